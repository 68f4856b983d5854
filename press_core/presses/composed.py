"""Several presses, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from press_core.call import AttentionCall
from press_core.composite import (
    CompositePress,
    acts_in_prefill_only,
    asked_ratio,
    check_child,
)
from press_core.eviction import Eviction
from press_core.press import Evicts, Press, require


@dataclass
class Composed(CompositePress):
    """Runs presses one after the other, each on what the former has left.

    Hidden states, queries and positions follow what is kept, so that any order works. A press that
    evicts other tokens of each head can only be the last.

    Attributes:
        presses: of the same mechanism, in the order in which they act.
    """

    presses: Sequence[Press]

    def validate(self) -> None:
        super().validate()
        listed = isinstance(self.presses, (list, tuple)) and len(self.presses) > 0
        require(self, "presses", listed, "a list of at least one press")
        for index, press in enumerate(self.presses):
            check_child(self, "presses", press)
            last = index == len(self.presses) - 1
            fits = acts_in_prefill_only(press) and (last or press.evicts is not Evicts.PER_HEAD)
            allowed = "presses that act after the prefill; one that evicts by head must be the last"
            require(self, "presses", fits, allowed)
            allowed = "such that a press that frees channels is the last"
            require(self, "presses", last or press.evicts is not Evicts.CHANNELS, allowed)
        by_head = self.presses[-1].evicts is Evicts.PER_HEAD
        rerotated = any(press.rerotates for press in self.presses)
        allowed = "such that no press rerotates keys where the last evicts by head"
        require(self, "presses", not (by_head and rerotated), allowed)

    @property
    def asked_ratio(self) -> float:
        return 1 - prod(1 - asked_ratio(press) for press in self.presses)

    @property
    def evicts(self) -> Evicts:  # type: ignore[override]
        last = self.presses[-1].evicts
        return last if last.needs_attention else Evicts.TOKENS

    def decide(self, call: AttentionCall) -> Eviction:
        eviction = Eviction.nothing(call)
        for press in self.presses:
            eviction = eviction.then(press.evict(eviction.next_call()))
        return eviction
