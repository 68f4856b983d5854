"""KVCompose (Akulov et al., arXiv 2509.05165): composite tokens, and layers that compete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from press_core.attention import attention_tiles
from press_core.budget import Tokens, n_kept
from press_core.call import AttentionCall
from press_core.fields import choice, count
from press_core.replay.rows import Chosen, ReplayPress, Row
from press_core.select import best_first, upcast
from press_core.traits import Evicts

Aggregation = Literal["max", "mean"]
AGGREGATIONS = ("max", "mean")

AT_A_TIME = 512
"""Tokens of the second reading in one forward: a mask over all of them would be `S * 2 S`."""


@dataclass
class KVCompose(ReplayPress):
    """Keeps what a context attends to when it is read again (arXiv 2509.05165).

    The context is run once more after itself. A key's score is the attention that it gets from
    those queries. Every head keeps tokens of its own, and all heads of a layer the same number: the
    best tokens of the heads of a layer make up its first *composite token*, the second best its
    second one, and the composite tokens of all layers compete. The first layer keeps at least as
    many as any other.

    Attributes:
        structured: whether all heads of a layer keep the same number of tokens. If not, the heads
            of all layers compete for themselves.
        compression_ratio: share of the tokens of all layers that is evicted, in [0, 1).
        agg_task: how the attention of all queries to a key makes its score: "max" or "mean".
        agg_group: the same of the scores of the query heads that share a KV head.
        agg_head: the same of the scores that make up a composite token.
        add_v_norm: multiply scores by the norm of the value.
        add_mean_across_heads: add the mean over the heads of a layer to the scores.
        keep_token_lower_bound: tokens that every layer keeps at least.
    """

    structured: bool = True
    agg_task: Aggregation = choice("max", AGGREGATIONS)
    agg_group: Aggregation = choice("mean", AGGREGATIONS)
    agg_head: Aggregation = choice("mean", AGGREGATIONS)
    add_v_norm: bool = False
    add_mean_across_heads: bool = True
    keep_token_lower_bound: int = count(0)

    @property
    def evicts(self) -> Evicts:
        return Evicts.TOKENS if self.structured else Evicts.PER_HEAD

    def score_row(self, row: Row) -> dict[int, Tensor]:
        received: dict[int, Tensor] = {}

        def see(call: AttentionCall) -> None:
            layer, groups = call.site.layer_idx, call.site.num_heads // call.site.num_kv_heads
            if layer not in received:
                zeros = torch.zeros_like(upcast(call.values[:, :, : row.length, 0]))
                received[layer] = zeros.unsqueeze(2).repeat(1, 1, groups, 1)
            for tile in attention_tiles(call.site, call.queries(), call.keys):
                weights, of_heads = tile.weights[..., : row.length], received[layer][:, tile.heads]
                if self.agg_task == "max":
                    torch.maximum(of_heads, weights.amax(dim=3), out=of_heads)
                else:  # the sum over the queries so far
                    of_heads += weights.sum(dim=3)

        with self.watch_attention(row, see), torch.no_grad():
            cache = row.alone()
            for start in range(0, row.length, AT_A_TIME):
                row.run(cache, start, input_ids=row.tokens[None, start : start + AT_A_TIME])
        values = {i: cache.layers[i].values[:, :, : row.length] for i in received}
        return {layer: self._scores(x, values[layer]) for layer, x in received.items()}

    def _scores(self, received: Tensor, values: Tensor) -> Tensor:
        """Scores `(1, H_kv, S)` from what each query head gave, `(1, H_kv, G, S)`, and values."""
        received = received / received.shape[-1] if self.agg_task == "mean" else received
        scores = received.amax(dim=2) if self.agg_group == "max" else received.mean(dim=2)
        scores = scores * upcast(values).norm(dim=-1) if self.add_v_norm else scores
        if self.add_mean_across_heads:
            scores = scores + scores.mean(dim=1, keepdim=True)
        return scores

    def choose(self, scores: dict[int, Tensor]) -> Chosen:
        stacked = torch.stack([layer[0] for layer in scores.values()])  # (L, H_kv, S)
        if self.structured:
            kept = self.budgets(stacked).view(-1, 1, 1).expand(*stacked.shape[:2], 1)
            chosen = best_first(stacked, kept)
        else:
            chosen = self._of_heads(stacked)
        return dict(zip(scores, chosen, strict=True))

    def budgets(self, scores: Tensor) -> Tensor:
        """How many tokens each layer keeps, `(L,)` int64, from scores `(L, H_kv, S)`."""
        in_order = scores.sort(dim=-1, descending=True).values
        curves = in_order.amax(dim=1) if self.agg_head == "max" else in_order.mean(dim=1)
        # At least as good as those of any layer, so that the first layer gets the largest budget.
        curves = torch.cat((curves.amax(dim=0, keepdim=True), curves[1:]))
        n_layers, length = curves.shape
        bound = self._bound(length)
        curves[:, :bound] = float("inf")
        # Stable: of equals the first layer's come first.
        order = curves.flatten().argsort(descending=True, stable=True)
        layers = order[: self._n_kept(n_layers, length)] // length
        return layers.bincount(minlength=n_layers).clamp(min=bound)

    def _of_heads(self, scores: Tensor) -> Tensor:
        """Which tokens each head keeps, `(L, H_kv, S)` bool."""
        n_layers, n_heads, length = scores.shape
        least = best_first(scores, self._bound(length))
        raised = scores.masked_fill(least, float("inf"))
        kept = best_first(raised.view(1, 1, -1), self._n_kept(n_layers * n_heads, length))
        return kept.view(scores.shape) | least

    def _bound(self, length: int) -> int:
        """How many of `length` tokens every layer (head) keeps at least; none is left empty."""
        return min(length, max(1, self.keep_token_lower_bound))

    def _n_kept(self, n: int, length: int) -> int:
        """How many tokens `n` layers (heads) keep together, of a context of `length`."""
        if isinstance(self.compression_ratio, Tokens):
            return n * self.compression_ratio.of(length)
        return n_kept(n * length, self.compression_ratio)
