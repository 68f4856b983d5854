"""Values of evicted tokens merged into those that stay: CaM, and merging after ToMe and D2O.

CaM (Zhang et al., ICML 2024, openreview LCTmppB165), token merging (arXiv 2210.09461) and D2O
(2406.13035).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import count, limited, share
from press_core.presses.decoding import RECEIVED, Accumulating, Decoding
from press_core.presses.positions import layer_generator, seed_field
from press_core.scoring import BudgetPress, Wrapper
from press_core.select import best_first, gather_tokens, places, upcast
from press_core.tiles import rows_at_once


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
        kept, evicted = (places(part) for part in (chosen, ~chosen))
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
        eviction = Eviction.keep(call, places(chosen))
        values = self.merged(eviction, places(merged.expand_as(chosen)))
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
