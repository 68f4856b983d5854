"""Budgets of heads: AdaKV, CriticalKV (arXiv 2502.03805), and DMS at inference (2506.05345).

AdaKV (Feng et al., 2407.11550) shares one budget among the heads of a layer; CriticalKV weights
values as the output does; DMS evicts by a threshold, delayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import count, limited, number, require, share
from press_core.model.sites import AttentionSite, output_weight
from press_core.scoring import Around, BudgetPress, TokenScorer, Wrapper
from press_core.select import best_first, trailing, upcast
from press_core.tiles import Scratch, rows_at_once
from press_core.traits import Evicts, Phase


@dataclass
class AdaKV(Wrapper, BudgetPress):
    """Shares one budget per layer over its KV heads, by score (Feng et al., arXiv 2407.11550).

    Heads keep different numbers of tokens: `n * H_kv` together, in a layer that stores no more.

    Attributes:
        press: scores tokens.
        alpha_safeguard: share of its even budget that every head keeps, at least one token.
    """

    alpha_safeguard: float = share(0.2)

    evicts = Evicts.PER_HEAD

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        scores = safeguarded(self.scorer.checked_scores(call), n, self.alpha_safeguard)
        return Eviction.keep_per_head(call, self.choose(call, scores, n))

    def choose(self, call: AttentionCall, scores: Tensor, n: int) -> Tensor:
        """Which tokens each head keeps, `n * H_kv` together: `(B, H_kv, S)` bool.

        Args:
            scores: `(B, H_kv, S)`, safeguarded.
        """
        return shared_budget(scores, n)


def safeguarded(scores: Tensor, n: int, share: float) -> Tensor:
    """The scores, infinite for the best `share` of the `n` tokens of each head, at least one."""
    return scores.masked_fill(best_first(scores, max(1, int(n * share))), float("inf"))


def shared_budget(scores: Tensor, n: int) -> Tensor:
    """`(B, H_kv, S)` bool: the best `n * H_kv` tokens over all heads, by scores `(B, H_kv, S)`."""
    return best_first(scores.flatten(1).unsqueeze(1), n * scores.shape[1]).view(scores.shape)


@dataclass
class Critical(Wrapper):
    """A press that weights scores by what the values become in the layer's output."""

    epsilon: float = number(1e-4, 0)
    first_stage_ratio: float = share(0.5)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        output_weight(site)

    def weighted(self, call: AttentionCall, scores: Tensor, n_first: int | Tensor) -> Tensor:
        """Weighted scores, infinite for the `n_first` best unweighted ones of each head."""
        first = best_first(scores, n_first)
        weighted = (scores + self.epsilon) * projected_norms(call, leaving_out=first)
        return weighted.masked_fill(first, float("inf"))


@dataclass
class CriticalKV(Critical, TokenScorer):
    """Weights the scores of a press by what the values become in the layer's output (2502.03805).

    Attributes:
        press: scores tokens.
        epsilon: added to the scores before they are weighted.
        first_stage_ratio: share of the budget that goes to the best unweighted scores.
    """

    @property
    def independent(self) -> bool:
        return self.scorer.independent

    def score(self, call: AttentionCall) -> Tensor:
        n_first = int(self.budget(call) * self.first_stage_ratio)
        return self.weighted(call, self.scorer.checked_scores(call), n_first)


@dataclass
class CriticalAdaKV(Critical, AdaKV):
    """AdaKV's head budgets, spent as CriticalKV does (arXiv 2407.11550, 2502.03805).

    Attributes:
        press: scores tokens.
        alpha_safeguard: share of its even budget that every head keeps, at least one token.
        epsilon: added to the scores before they are weighted.
        first_stage_ratio: share of a head's budget that goes to the best unweighted scores.
    """

    def choose(self, call: AttentionCall, scores: Tensor, n: int) -> Tensor:
        budgets = shared_budget(scores, n).sum(dim=-1, keepdim=True)
        n_first = (budgets * self.first_stage_ratio).int()
        return best_first(self.weighted(call, scores, n_first), budgets)


@torch.no_grad()
def projected_norms(call: AttentionCall, leaving_out: Tensor) -> Tensor:
    """L1 norm of each value after the output projection, mean over the group.

    Some tokens at a time: what is projected is `D / d` times as large as the values.

    Args:
        leaving_out: `(B, H_kv, S)` bool, tokens whose norms nobody asks for.

    Returns:
        `(B, H_kv, S)`, float32; 0 for those.
    """
    values = call.values
    weight = output_weight(call.site).to(values.dtype)
    of_heads = weight.unflatten(1, (values.shape[1], -1, values.shape[-1]))  # (D, H_kv, G, d)
    n_rows = rows_at_once(values, len(weight))
    norms, space = upcast(values.new_zeros(values.shape[:3])), Scratch(values)
    for head in range(values.shape[1]):
        for part in (~leaving_out[:, head]).nonzero().split(n_rows):
            rows, tokens = part.unbind(1)
            asked, projected = values[rows, head, tokens], space.of(len(part), len(weight))
            for columns in of_heads[:, head].unbind(1):
                torch.mm(asked, columns.T, out=projected)
                norms[rows, head, tokens] += projected.abs_().sum(dim=-1, dtype=norms.dtype)
    return norms.div_(of_heads.shape[2])


SCORES = "recent scores"
THRESHOLD = "a number: tokens that score lower are evicted"


@dataclass
class DMS(Around):
    """Evicts from each head what scores below a threshold once it leaves the window (2506.05345).

    Attributes:
        press: scores tokens.
        threshold: tokens that score lower are evicted.
        sliding_window_size: last tokens, which are not evicted yet.
        decoding: whether to go on while decoding; each token is then judged by the score it had
            when it came.
    """

    threshold: float = limited(None, lambda x: x is not None and x == x, THRESHOLD)
    sliding_window_size: int = count(128, 1)
    decoding: bool = False

    evicts = Evicts.PER_HEAD

    def validate(self) -> None:
        super().validate()
        fits = self.scorer.independent or not self.decoding
        allowed = (
            "one that scores each token by itself (KVzapPress, KnormPress, QFilterPress, or a "
            "ScorerPress of your own) with decoding=True, where a token is judged when it comes"
        )
        require(self, "press", fits, allowed)

    @property
    def phases(self) -> Phase:
        return Phase.PREFILL | Phase.DECODING if self.decoding else Phase.PREFILL

    def keeps(self, length: int) -> int:
        return 1 if self.is_long_enough(length) else length  # or more: the threshold decides

    def compress(self, call: AttentionCall) -> Eviction:
        if not self.is_long_enough(call.length):
            return Eviction.nothing(call)
        scores, window = self.scorer.checked_scores(call), self.sliding_window_size
        if SCORES not in call.carried:
            kept = (scores >= self.threshold) | trailing(call.keys, window)
            return Eviction.keep_per_head(call, kept, {SCORES: scores[..., -window:]})
        known = torch.cat((call.carried[SCORES], scores), dim=-1)
        leaving = max(0, known.shape[-1] - window)
        late = known[..., :leaving] < self.threshold
        return Eviction.late(call, late, {SCORES: known[..., leaving:]})
