"""Merging on eviction, after token merging (arXiv 2210.09461) and D2O (2406.13035)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from press_core.blocks import rows_at_once
from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.eviction import Eviction
from press_core.press import require
from press_core.select import best_first, gather_tokens, places, upcast


@dataclass
class Merging(Wrapper):
    """Merges the value of each evicted token into the kept one with the most similar key.

    Keys stay as they are, so that positions do.

    Attributes:
        press: scores tokens.
        similarity_threshold: cosine of two keys from which on values are merged, in [0, 1].
        merge_fraction: share of the evicted tokens that is merged, the most similar, in (0, 1]; of
            each head at least one.
    """

    similarity_threshold: float = 0.0
    merge_fraction: float = 1.0

    def validate(self) -> None:
        super().validate()
        fits = 0 <= self.similarity_threshold <= 1
        require(self, "similarity_threshold", fits, "a number in [0, 1]")
        require(self, "merge_fraction", 0 < self.merge_fraction <= 1, "a number in (0, 1]")

    def decide(self, call: AttentionCall) -> Eviction:
        if self.leaves_whole(call):
            return Eviction.nothing(call)
        chosen = best_first(self.scorer.token_scores(call), self.budget(call))
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
    cosine = found.new_empty(found.shape[:3])
    place = torch.empty_like(cosine, dtype=torch.int64)
    n_rows = rows_at_once(keys, len(keys) * others.shape[2])
    for head in range(keys.shape[1]):
        for start in range(0, keys.shape[2], n_rows):
            rows = slice(start, start + n_rows)
            best = (found[:, head, rows] @ directions[:, head].mT).max(dim=-1)
            cosine[:, head, rows], place[:, head, rows] = best
    return cosine, place


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
