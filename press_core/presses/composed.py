"""Several presses, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, prod

from press_core.call import AttentionCall
from press_core.composite import (
    CompositePress,
    acts_in_prefill_only,
    asked_ratio,
    check_child,
)
from press_core.errors import HyperparameterError
from press_core.eviction import Eviction
from press_core.press import Evicts, Press, require
from press_core.select import Amount, Tokens


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

    def with_ratio(self, compression_ratio: Amount) -> Press:
        """A copy whose presses share what is to be evicted as these do."""
        weights = _shares(self.presses)
        presses, done = list(self.presses), 0.0
        for index, weight in weights.items():
            share = _share_of(compression_ratio, weight, done)
            presses[index] = presses[index].with_ratio(share)
            done += weight
        return replace(self, presses=presses)

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


def _shares(presses: Sequence[Press]) -> dict[int, float]:
    """By its place, how much of what is evicted each press evicts that can be told; 1 in all.

    Raises:
        HyperparameterError: if none can be told.
    """
    kept = {i: 1 - asked_ratio(press) for i, press in enumerate(presses) if _can_be_told(press)}
    if not kept:
        presses[-1].with_ratio(0.5)  # says what to do
    total = log(prod(kept.values()))
    return {i: log(share) / total if total else 1 / len(kept) for i, share in kept.items()}


def _can_be_told(press: Press) -> bool:
    try:
        press.with_ratio(0.5)
    except HyperparameterError:
        return False
    return True


def _share_of(amount: Amount, weight: float, done: float) -> Amount:
    """What a press is told whose `weight` of `amount` comes after `done` of it."""
    if not isinstance(amount, Tokens):
        return 1 - (1 - amount) ** weight
    left = 1 - amount.progress * done
    return Tokens(amount.n, min(1.0, amount.progress * weight / left))
