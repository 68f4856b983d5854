"""Presses made of presses."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from press_core.budget import Amount
from press_core.call import AttentionCall
from press_core.fields import limited
from press_core.press import MeasuredPress, Press
from press_core.scoring import TokenScorer
from press_core.traits import Needs, Phase

READS = Needs.QUERIES | Needs.FORWARD | Needs.HIDDEN_STATES
"""What a press may read of the forwards that brought the tokens, beside keys and values."""


def is_scorer(press: Press) -> bool:
    """Whether a press gives each token a score."""
    return isinstance(press, TokenScorer)


def scores_again(press: Press) -> bool:
    """Whether a press scores tokens, and can score them again in later forwards."""
    return is_scorer(press) and Needs.FORWARD not in press.needs


SCORER = is_scorer, "a press that scores tokens (a ScorerPress or CriticalKVPress)"
SCORER_AGAIN = scores_again, f"{SCORER[1]} and can score them again later"
"""What a field for a press may hold: whether it is such, and in words."""


def acts_in_prefill_only(press: Press) -> bool:
    """Whether a press acts around the attention forwards of a prefill, and at no other time."""
    return press.phases & ~(Phase.DECODER | Phase.CHUNKS) == Phase.PREFILL


@dataclass
class Composition(MeasuredPress):
    """A press that leaves part of its work to others, which it never changes."""

    @property
    def buffered_tokens(self) -> int:
        """As many as its `hidden_states_buffer_size` says, if a part may ask for them."""
        may_ask = any(part.needs & READS for part in self.parts)
        own: int = vars(self).get("hidden_states_buffer_size", 0) if may_ask else 0
        return max(own, super().buffered_tokens)


@dataclass
class Around(Composition):
    """A press around one other.

    Attributes:
        press: the press that it wraps, of the same mechanism.
    """

    press: Press = limited(MISSING, *SCORER)

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
