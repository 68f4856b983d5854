"""Presses made of presses."""

from __future__ import annotations

from dataclasses import dataclass

from press_core.budget import Amount
from press_core.call import AttentionCall
from press_core.fields import require
from press_core.press import Press
from press_core.scoring import TokenScorer
from press_core.traits import Needs, Phase


@dataclass
class Composition(Press):
    """A press that leaves part of its work to others, which it never changes."""

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted in the scope opened last; before, what is asked."""
        run = self.last_run
        return self.asked_ratio if run is None or not run.n_forwards else run.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, ratio: Amount) -> None:
        vars(self).pop("_last_scope", None)
        vars(self).update(vars(self.with_ratio(ratio)))


@dataclass
class Around(Composition):
    """A press around one other.

    Attributes:
        press: the press that it wraps, of the same mechanism.
    """

    press: Press

    def validate(self) -> None:
        super().validate()
        require(self, "press", *self.takes(self.press))

    def takes(self, press: Press) -> tuple[bool, str]:
        """Whether `press` can be wrapped, and what can be."""
        return is_scorer(press)

    @property
    def scorer(self) -> TokenScorer:
        """The wrapped press, where it has to score tokens."""
        assert isinstance(self.press, TokenScorer)
        return self.press

    def is_long_enough(self, length: int) -> bool:
        return self.press.is_long_enough(length)


@dataclass
class Wrapper(Around):
    """A press around one other, whose budget it has."""

    @property
    def amount(self) -> Amount:
        return self.press.amount

    @property
    def asked_ratio(self) -> float:
        return self.press.asked_ratio

    def keeps(self, length: int) -> int:
        return self.press.keeps(length)

    def budget(self, call: AttentionCall) -> int:
        return self.press.budget(call)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        return self.changed(press=self.press.with_ratio(compression_ratio))


def is_scorer(press: Press) -> tuple[bool, str]:
    """Whether a press gives each token a score, and a word for those that do."""
    scores = isinstance(press, TokenScorer)
    return scores, "a press that scores tokens (a ScorerPress or CriticalKVPress)"


def scores_again(press: Press) -> tuple[bool, str]:
    """Whether a press scores tokens, and can score them again in later forwards."""
    fits, allowed = is_scorer(press)
    return fits and Needs.FORWARD not in press.needs, f"{allowed} and can score them again later"


def acts_in_prefill_only(press: Press) -> bool:
    """Whether a press acts around the attention forwards of a prefill, and at no other time."""
    return press.phases & ~(Phase.DECODER | Phase.CHUNKS) == Phase.PREFILL
