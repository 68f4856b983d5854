"""Presses that give each token a score and keep the best."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import isnan
from typing import Any

from torch import Tensor

from press_core.call import AttentionCall
from press_core.errors import PressError
from press_core.eviction import Eviction
from press_core.press import Press, RatioPress
from press_core.select import top_positions


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
