"""Presses that give each token a score and keep the best, and presses made of presses."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import MISSING, dataclass
from math import isnan
from typing import Any

from torch import Tensor

from press_core.budget import Amount
from press_core.call import AttentionCall
from press_core.errors import PressError
from press_core.eviction import Eviction
from press_core.fields import limited
from press_core.press import MeasuredPress, Press, RatioPress
from press_core.select import top_positions
from press_core.traits import Needs, Phase


@dataclass
class BudgetPress(Press):
    """A press that leaves what fits its budget as it is."""

    def compress(self, call: AttentionCall) -> Eviction:
        n = self.budget(call)
        return Eviction.nothing(call) if n >= call.length else self.spend(call, n)

    @abstractmethod
    def spend(self, call: AttentionCall, n: int) -> Eviction:
        """What is left of `call` if heads keep `n` tokens, fewer than there are."""


@dataclass
class TokenScorer(BudgetPress):
    """A press that gives each token a score and keeps the best.

    Attributes:
        independent: class attribute; whether a token's score depends on no other token.
    """

    @property
    def independent(self) -> bool:
        return False

    def score(self, call: AttentionCall) -> Tensor:
        """The formula: scores `(B, H_kv, S)`, floating point, the higher the better."""
        raise NotImplementedError(f"{type(self).__name__} says nowhere how it scores tokens")

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        return Eviction.keep(call, top_positions(self.checked_scores(call), n))

    def checked_scores(self, call: AttentionCall) -> Tensor:
        """What `score` returns, if tokens can be ranked by it.

        Raises:
            PressError: naming the press and what it should have returned.
        """
        scores: Any = self.score(call)
        expected, name = tuple(call.keys.shape[:3]), type(self).__name__
        given: Any = type(scores).__name__
        if isinstance(scores, Tensor):
            shape = f"shape {tuple(scores.shape)}"
            given = shape if scores.is_floating_point() else scores.dtype
        if given != f"shape {expected}":
            raise PressError(
                f"{name}.score returned {given}; scores are a floating-point tensor "
                f"(B, H_kv, S), here {expected}"
            )
        # NaN would be the best of all. The sum tells in a third of the time that there is none.
        if isnan(scores.detach().sum()) and bool(scores.isnan().any()):
            raise PressError(
                f"{name}.score returned NaN for some tokens of {call.site.name}, which has no rank "
                "among numbers; -inf evicts a token first, inf last"
            )
        return scores


@dataclass
class RatioScorer(RatioPress, TokenScorer):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens."""

    independent = False  # ahead of what a mechanism takes for granted of others


# ---- presses made of presses ---------------------------------------------------------------------

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


@dataclass
class Wrapper(Around):
    """A press around one other, whose budget it has."""

    @property
    def amount(self) -> Amount:
        return self.press.amount

    def budget(self, call: AttentionCall) -> int:
        return self.press.budget(call)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        return self.changed(press=self.press.with_ratio(compression_ratio))
