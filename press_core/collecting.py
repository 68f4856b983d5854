"""Showing the calls of a model to a function, by the mechanism of a press."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.press import Press
from press_core.traits import Evicts, Needs, Phase


@dataclass
class Collecting(Press):
    """Shows the call of every attention module to a function, and evicts nothing.

    Attributes:
        see: what to show it to; rows of different padding are shown one after the other, without.
        reads: what the calls are to hold.
        phases: which forwards are shown: those that bring a context, or those that come later.
        thread: whose forwards are shown; None: all.
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
