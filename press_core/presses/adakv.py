"""AdaKV (Feng et al., arXiv 2407.11550): heads share one budget by their scores."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.eviction import Eviction
from press_core.press import Evicts, require
from press_core.select import best_first


@dataclass
class AdaKV(Wrapper):
    """Shares one budget per layer over its KV heads, by score (Feng et al., arXiv 2407.11550).

    Heads keep different numbers of tokens: `n * H_kv` together, in a layer that stores no more.

    Attributes:
        press: scores tokens.
        alpha_safeguard: share of its even budget that every head keeps, at least one token.
    """

    alpha_safeguard: float = 0.2

    evicts = Evicts.PER_HEAD

    def validate(self) -> None:
        super().validate()
        fits = 0 <= self.alpha_safeguard <= 1
        require(self, "alpha_safeguard", fits, "a number in [0, 1]")

    def decide(self, call: AttentionCall) -> Eviction:
        if self.leaves_whole(call):
            return Eviction.nothing(call)
        return Eviction.keep_per_head(call, self.choose(call, self.scorer.token_scores(call)))

    def choose(self, call: AttentionCall, scores: Tensor) -> Tensor:
        """Which tokens each head keeps, `(B, H_kv, S)` bool."""
        return shared_budget(scores, self.budget(call), self.alpha_safeguard)


def safeguarded(scores: Tensor, n: int, alpha_safeguard: float) -> Tensor:
    """`(B, H_kv, S)` bool: the best tokens of each head, which it keeps in any case."""
    return best_first(scores, max(1, int(n * alpha_safeguard)))


def shared_budget(scores: Tensor, n: int, alpha_safeguard: float) -> Tensor:
    """The best `n * H_kv` tokens over all heads, each head's safeguarded ones among them.

    Args:
        scores: `(B, H_kv, S)`.

    Returns:
        `(B, H_kv, S)` bool.
    """
    raised = scores.masked_fill(safeguarded(scores, n, alpha_safeguard), float("inf"))
    together = raised.flatten(1).unsqueeze(1)
    return best_first(together, n * scores.shape[1]).view(scores.shape)
