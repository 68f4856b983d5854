"""A press that passes the calls of a model to a function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.press import Press
from press_core.traits import Evicts, Needs, Phase


@dataclass
class Collecting(Press):
    """Passes the call of every attention module to a function, and evicts nothing.

    Attributes:
        see: the function; it gets a call for each group of equally padded rows, without padding.
        reads: what the calls have to contain.
        phases: the forwards to pass on: of prefills, or of decoding.
        thread: the thread whose forwards to pass on; None: all.
    """

    see: Callable[[AttentionCall], Any]
    reads: Needs = Needs.QUERIES
    phases: Phase = Phase.PREFILL
    thread: int | None = None

    evicts = Evicts.NOTHING

    @property
    def needs(self) -> Needs:
        return self.reads | Needs.HIDDEN_STATES

    def compress(self, call: AttentionCall) -> Eviction:
        self.see(call)
        return Eviction.nothing(call)
