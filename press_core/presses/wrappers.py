"""Presses around one press that spend its budget otherwise: by head, by threshold, or by merging.

AdaKV (Feng et al., arXiv 2407.11550) shares one budget among the heads of a layer; CriticalKV
(2502.03805) weights values as the output does; DMS at inference (2506.05345) evicts by a threshold,
delayed. CaM (Zhang et al., ICML 2024, openreview LCTmppB165), and merging after ToMe (2210.09461)
and D2O (2406.13035), merge values of evicted tokens into those that stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import count, limited, number, require, share
from press_core.model.sites import AttentionSite, output_weight
from press_core.presses.decoding import RECEIVED, Accumulating, Decoding
from press_core.presses.positions import layer_generator, seed_field
from press_core.scoring import Around, BudgetPress, TokenScorer, Wrapper
from press_core.select import best_first, gather_tokens, trailing, true_indices, upcast
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
        scores = self.scorer.checked_scores(call)
        safe = best_first(scores, max(1, int(n * self.alpha_safeguard)))
        kept = self.choose(call, scores.masked_fill(safe, float("inf")), n)
        return Eviction.keep_per_head(call, kept)

    def choose(self, call: AttentionCall, scores: Tensor, n: int) -> Tensor:
        """Which tokens each head keeps, `n * H_kv` together: `(B, H_kv, S)` bool.

        Args:
            scores: `(B, H_kv, S)`, infinite for the tokens that each head keeps in any case.
        """
        return shared_budget(scores, n)


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


@dataclass
class Merging(Wrapper, BudgetPress):
    """Merges the value of each evicted token into the kept one with the most similar key.

    Keys stay as they are, so that positions do.

    Attributes:
        press: scores tokens.
        similarity_threshold: cosine of two keys from which on values are merged, in [0, 1].
        merge_fraction: share of the evicted tokens that is merged, the most similar, in (0, 1]; of
            each head at least one.
    """

    similarity_threshold: float = share(0.0)
    merge_fraction: float = limited(1.0, lambda x: 0 < x <= 1, "a number in (0, 1]")

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        chosen = best_first(self.scorer.checked_scores(call), n)
        kept, evicted = (true_indices(part) for part in (chosen, ~chosen))
        eviction = Eviction.keep(call, kept)
        values = self.merged(eviction, call.select(evicted))
        return replace(eviction, values=values)

    def merged(self, kept: Eviction, evicted: AttentionCall) -> Tensor:
        """The kept values with the evicted ones merged into them, `(B, H_kv, n, d)`."""
        similarity, target = most_similar(evicted.keys, kept.keys)
        merges = similarity >= self.similarity_threshold
        if self.merge_fraction < 1:
            n_merged = 1 + int((evicted.length - 1) * self.merge_fraction)
            merges &= best_first(similarity, n_merged)
        values, added = upcast(kept.values), upcast(evicted.values)
        norms = values.norm(dim=-1).gather(-1, target), added.norm(dim=-1)
        weights = similarity.clamp(min=0) * norms[1] / (norms[1] + norms[0] + 1e-6)
        return add_weighted(values, added, weights * merges, target).to(kept.values.dtype)


def most_similar(keys: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """For each of `keys` `(B, H_kv, m, d)` the closest of `others` `(B, H_kv, n, d)` by direction.

    Returns:
        Its cosine, `(B, H_kv, m)` float32, and its place, int64.
    """
    found, directions = (normalize(upcast(x), dim=-1) for x in (keys, others))
    n_rows = rows_at_once(keys, others[..., 0].numel())
    best = [(rows @ directions.mT).max(dim=-1) for rows in found.split(n_rows, dim=2)]
    return torch.cat([x.values for x in best], dim=-1), torch.cat([x.indices for x in best], dim=-1)


def add_weighted(values: Tensor, added: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """`(v_j + sum w_e v_e) / (1 + sum w_e)` over those `e` whose target is `j`.

    Sorted by target and summed run by run: unlike a scattered sum that adds in the same order each
    time, on a GPU too.

    Args:
        values: `(B, H_kv, n, d)`.
        added: `(B, H_kv, m, d)`.
        weights, target: `(B, H_kv, m)`; places among the `n`.
    """
    counts = torch.zeros(values.shape[:3], dtype=torch.int64, device=values.device)
    counts = counts.scatter_add_(-1, target, torch.ones_like(target))
    order = target.argsort(dim=-1, stable=True)
    weights = weights.gather(-1, order).unsqueeze(-1)
    # The weights themselves are summed as one channel more.
    terms = torch.cat((gather_tokens(added, order) * weights, weights), dim=-1)
    sums = torch.segment_reduce(terms.flatten(0, 2), "sum", lengths=counts.flatten(), axis=0)
    sums = sums.view(*values.shape[:3], -1)
    return (values + sums[..., :-1]) / (1 + sums[..., -1:])


@dataclass
class CAM(Accumulating, Decoding):
    """Prunes while decoding, and merges values that go into those that stay (CaM, LCTmppB165).

    Of the evicted tokens as many are merged as there were steps since the last pruning, those with
    the best scores. Each goes, in equal parts, to the next `merge_budget` kept tokens with the
    probability `clamp(a / mean a of these, 0, 1)`, `a` the attention that a token has received
    while decoding. All heads keep the same tokens, by the mean of their scores.

    Attributes:
        base_press: scores tokens.
        compression_interval: forwards after the prefill from one pruning to the next.
        target_size: tokens that each KV head then keeps.
        hidden_states_buffer_size: of how many of the last tokens since then the hidden states and
            queries are kept for `base_press`, if it may ask for them.
        merge_budget: kept tokens that an evicted one is shared among.
        seed: numbers come from `(seed, layer_idx, forward)` and are equal on every device, for
            every row of a batch and with both mechanisms. None: from torch's global generator.
    """

    merge_budget: int = count(32, 1)
    seed: int | None = seed_field()

    def compress(self, call: AttentionCall) -> Eviction:
        scorer: Any = self.base_press
        n = scorer.budget(call.with_budget(self.budget(call)))
        if n >= call.length:
            return Eviction.nothing(call)
        scores = scorer.checked_scores(call.with_budget(n)).mean(dim=1, keepdim=True)
        chosen = best_first(scores, n).expand(call.keys.shape[:3])
        n_merged = min(call.when.n_steps, call.length - n)
        merged = best_first(scores.masked_fill(chosen[:, :1], float("-inf")), n_merged)
        eviction = Eviction.keep(call, true_indices(chosen))
        values = self.merged(eviction, true_indices(merged.expand_as(chosen)))
        return replace(eviction, values=values)

    def merged(self, kept: Eviction, evicted: Tensor) -> Tensor:
        """The kept values with evicted ones merged into them, `(B, H_kv, n, d)`.

        Args:
            evicted: `(B, H_kv, m)` int64, which to merge.
        """
        call, received = kept.call, kept.call.memory[RECEIVED]
        shares = shares_of_next(kept.known_kept, evicted, self.merge_budget).to(received.dtype)
        of_next = (shares @ received.gather(-1, kept.known_kept).unsqueeze(-1)).squeeze(-1)
        of_evicted = received.gather(-1, evicted)
        probabilities = of_evicted / of_next.clamp(min=torch.finfo(received.dtype).tiny)
        numbers = uniform(evicted.shape[1:], self.seed, call.site.layer_idx, call.when.n_forwards)
        drawn = numbers.to(received) < probabilities
        added = gather_tokens(upcast(call.values), evicted) * drawn.unsqueeze(-1)
        return (upcast(kept.values) + shares.mT @ added).to(kept.values.dtype)


def uniform(shape: torch.Size, seed: int | None, layer_idx: int, forward: int) -> Tensor:
    """Numbers in [0, 1) of some shape, float32, on the CPU; see `CAM.seed`."""
    generator = layer_generator(seed, layer_idx)
    if generator is not None:
        generator.manual_seed(int(torch.randint(2**62, (), generator=generator)) + forward)
    return torch.rand(shape, generator=generator)


def shares_of_next(kept: Tensor, evicted: Tensor, n_next: int) -> Tensor:
    """Equal parts of each of `evicted` for the next `n_next` of `kept` (fewer at the end).

    Args:
        kept: `(B, H_kv, n)` int64, ascending.
        evicted: `(B, H_kv, m)` int64.

    Returns:
        `(B, H_kv, m, n)`, rows that sum to 1, or to 0 where nothing that is kept comes after.
    """
    before = (kept.unsqueeze(2) < evicted.unsqueeze(3)).sum(dim=-1, keepdim=True)
    index = torch.arange(kept.shape[-1], device=kept.device)
    receives = (index >= before) & (index < before + n_next)
    return receives / receives.sum(dim=-1, keepdim=True).clamp(min=1)
