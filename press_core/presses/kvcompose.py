"""KVCompose (Akulov et al., arXiv 2509.05165): composite tokens, and layers that compete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from press_core.attention import attention_blocks
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.press import Evicts, require
from press_core.replay import ReplayPress, Row
from press_core.select import Tokens, best_first, n_kept, places, upcast

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
    agg_task: Aggregation = "max"
    agg_group: Aggregation = "mean"
    agg_head: Aggregation = "mean"
    add_v_norm: bool = False
    add_mean_across_heads: bool = True
    keep_token_lower_bound: int = 0

    def validate(self) -> None:
        super().validate()
        for name in ("agg_task", "agg_group", "agg_head"):
            known = getattr(self, name) in AGGREGATIONS
            require(self, name, known, " or ".join(map(repr, AGGREGATIONS)))
        enough = self.keep_token_lower_bound >= 0
        require(self, "keep_token_lower_bound", enough, "a number of tokens, 0 or more")

    @property
    def evicts(self) -> Evicts:  # type: ignore[override]
        return Evicts.TOKENS if self.structured else Evicts.PER_HEAD

    def score_row(self, row: Row) -> dict[int, Tensor]:
        received: dict[int, Tensor] = {}
        norms: dict[int, Tensor] = {}

        def see(call: AttentionCall) -> None:
            layer, values = call.site.layer_idx, call.values[:, :, : row.length]
            received[layer] = received_again(call, row.length, self.agg_task, received.get(layer))
            if self.add_v_norm and layer not in norms:
                norms[layer] = upcast(values).norm(dim=-1)

        with self.watch_attention(row, see), torch.no_grad():
            cache = row.alone()
            for start, ids in zip(
                range(0, row.length, AT_A_TIME), row.tokens.split(AT_A_TIME), strict=True
            ):
                row.run(cache, start, input_ids=ids[None])
        return {
            layer: self._scores(of_queries, norms.get(layer), row.length)
            for layer, of_queries in received.items()
        }

    def _scores(self, received: Tensor, norms: Tensor | None, length: int) -> Tensor:
        """Scores `(1, H_kv, S)` from what each query head gave, `(1, H_kv, G, S)`, and values."""
        received = received / length if self.agg_task == "mean" else received
        scores = received.amax(dim=2) if self.agg_group == "max" else received.mean(dim=2)
        scores = scores if norms is None else scores * norms
        if self.add_mean_across_heads:
            scores = scores + scores.mean(dim=1, keepdim=True)
        return scores

    def choose(self, scores: dict[int, Tensor]) -> dict[int, Tensor]:
        stacked = torch.stack([layer[0] for layer in scores.values()])  # (L, H_kv, S)
        chosen = self._of_layers(stacked) if self.structured else self._of_heads(stacked)
        return dict(zip(scores, chosen, strict=True))

    def left(self, call: AttentionCall, chosen: Tensor) -> Eviction:
        if self.structured:
            return Eviction.keep(call, places(chosen))
        return super().left(call, chosen)

    def _of_layers(self, scores: Tensor) -> Tensor:
        """Which tokens each head keeps, `(L, H_kv, S)` bool, as many in each head of a layer."""
        kept = self.budgets(scores).view(-1, 1, 1).expand(-1, scores.shape[1], -1)
        return best_first(scores, kept)

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


def received_again(
    call: AttentionCall, length: int, agg_task: Aggregation, before: Tensor | None
) -> Tensor:
    """Attention that each key of a context gets when the context is read again.

    Args:
        call: a part of the second reading, over the keys of both.
        length: of the context.
        agg_task: the largest, or (for "mean") the sum over the queries.
        before: what earlier parts came to.

    Returns:
        `(1, H_kv, G, length)`, float32.
    """
    queries, n_kv = call.queries(), call.keys.shape[1]
    if before is None:
        zeros = upcast(call.keys[..., 0]).new_zeros
        before = zeros(len(queries), n_kv, queries.shape[1] // n_kv, length)
    received = before.clone()
    for block in attention_blocks(call.site, queries, call.keys):
        weights, of_heads = block.weights[..., :length], received[:, block.heads]
        if agg_task == "max":
            received[:, block.heads] = torch.maximum(of_heads, weights.amax(dim=3))
        else:
            received[:, block.heads] = of_heads + weights.sum(dim=3)
    return received
