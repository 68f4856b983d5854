"""Attention weights for scoring, grouped by KV head so that no key is repeated.

The weights equal the model's: with its scaling, soft-capping and learned attention sinks, and with
bidirectional attention within an image if the model has that.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.model.sites import AttentionSite
from press_core.select import upcast
from press_core.tiles import rows_at_once


@torch.no_grad()
def window_attention(call: AttentionCall, window: int) -> Tensor:
    """Attention of the last `window` queries over all keys.

    Returns:
        `(B, H_kv, G, window, S)`, float32 (float64 for float64 states); every row sums to one
        (to less with a learned sink).
    """
    queries = call.queries(window).unflatten(1, (call.keys.shape[1], -1))
    bidirectional = call.bidirectional_of(queries.shape[3])
    space = upcast(call.keys[:0]).new_empty(0)
    return causal_weights(call.site, queries, call.keys, space, bidirectional=bidirectional)


def attention_tiles(call: AttentionCall, queries: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Attention of the last queries over all keys, tile by tile: O(S) memory.

    It is causal, or bidirectional within an image, which is never split.

    Args:
        queries: `(B, H, q, d)`, of the last `q` of the `S` tokens.

    Yields:
        Which KV heads and which queries a tile covers, and its weights `(B, heads, G, rows, end)`,
        float32 (float64 for float64 states). Keys from `end` on are visible to none of the queries.
        The next tile overwrites the weights.
    """
    batch, n_heads, n_queries = queries.shape[:3]
    keys, bidirectional = call.keys, call.bidirectional_of(n_queries)
    n_kv, length = keys.shape[1:3]
    if bidirectional is not None:
        bidirectional = bidirectional.expand(-1, n_kv, -1, -1)
    per_query = batch * (n_heads // n_kv) * length
    n_at_once = min(n_kv, rows_at_once(keys, per_query * n_queries))
    n_rows = rows_at_once(keys, per_query * n_at_once)
    grouped, space = queries.unflatten(1, (n_kv, -1)), upcast(keys[:0]).new_empty(0)
    for head in range(0, n_kv, n_at_once):
        heads = slice(head, head + n_at_once)
        of_heads = None if bidirectional is None else bidirectional[:, heads]
        row = 0
        while row < n_queries:
            rows = slice(row, _closed(of_heads, min(row + n_rows, n_queries)))
            visible = keys[:, heads, : length - n_queries + rows.stop]
            of_tile = None if of_heads is None else of_heads[:, :, rows, rows]
            tile = grouped[:, heads, :, rows]
            weights = causal_weights(call.site, tile, visible, space, heads, of_tile)
            yield heads, rows, weights
            row = rows.stop


def _closed(bidirectional: Tensor | None, stop: int) -> int:
    """The smallest index from `stop` on such that no query before it sees a key at or after it."""
    while bidirectional is not None:
        columns = bidirectional[:, :, :stop].flatten(0, 2).any(dim=0).nonzero()
        reach = int(columns.max()) + 1 if len(columns) else 0
        if reach <= stop:
            break
        stop = reach
    return stop


@torch.no_grad()
def received_attention(call: AttentionCall) -> Tensor:
    """Attention that each key receives from the known queries of this forward.

    Computed from the weights that the layer returned, if it did.

    Returns:
        `(B, H_kv, S)`, float32; mean over the GQA group, summed over the queries.
    """
    if call.attentions is None:
        queries = call.queries()
        return mean_attention(call, queries).mul_(queries.shape[2])
    received = torch.zeros_like(upcast(call.keys[..., 0]))
    end = call.length - call.attentions.shape[2]
    for rows in call.attentions.unflatten(1, (received.shape[1], -1)).split(64, dim=3):
        end += rows.shape[3]
        visible = end if call.at.bidirectional is None else call.length
        # Summing over both dimensions at once takes twenty times as long.
        received[..., :visible] += upcast(rows[..., :visible]).sum(dim=3).sum(dim=2)
    return received.div_(call.attentions.shape[1] // received.shape[1])


@torch.no_grad()
def mean_attention(call: AttentionCall, queries: Tensor, factors: Tensor | None = None) -> Tensor:
    """Mean attention that each key receives from the last queries, over queries and GQA group.

    Args:
        queries: `(B, H, q, d)`; `q` may be 0, for rows without tokens in a turn.
        factors: `(q,)`, factors for the attention of each query.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    received = torch.zeros_like(upcast(call.keys[..., 0]))
    for heads, rows, weights in attention_tiles(call, queries):
        if factors is not None:
            weights = weights * factors[rows].unsqueeze(-1)
        received[:, heads, : weights.shape[-1]] += weights.sum(dim=(2, 3))
    return received.div_(queries.shape[1] // received.shape[1] * max(1, queries.shape[2]))


def causal_weights(
    site: AttentionSite,
    queries: Tensor,
    keys: Tensor,
    space: Tensor,
    heads: slice = slice(None),
    bidirectional: Tensor | None = None,
) -> Tensor:
    """Causal attention weights of the queries of the last of `S` tokens.

    Args:
        queries: `(B, heads, G, rows, d)`.
        keys: `(B, heads, S, d)`.
        space: memory for the weights, of any size.
        heads: which of the module's KV heads these are.
        bidirectional: `(B, 1 or heads, rows, rows)` bool, which later tokens each
            query sees; None: none.

    Returns:
        `(B, heads, G, rows, S)`, at least float32.
    """
    n_rows, length = queries.shape[3], keys.shape[2]
    logits = space.resize_(*queries.shape[:4], length)
    # In 16 bits, large products would overflow, or lose what tells tokens apart.
    left, right = upcast(queries.flatten(2, 3).flatten(0, 1)), upcast(keys.flatten(0, 1)).mT
    logits.view(*left.shape[:2], -1).baddbmm_(left, right, beta=0, alpha=site.softmax.scaling)
    if site.softmax.softcap is not None:
        logits = logits.div_(site.softmax.softcap).tanh_().mul_(site.softmax.softcap)
    future = torch.ones(n_rows, n_rows, dtype=torch.bool, device=keys.device).triu(1)
    hidden = future if bidirectional is None else future & ~bidirectional.unsqueeze(2)
    logits[..., length - n_rows :].masked_fill_(hidden, float("-inf"))
    if site.sinks is None:
        return torch.softmax(logits, dim=-1, out=logits)  # allocating another doubles the time
    return softmax_with_sinks(logits, site.sinks.view(site.num_kv_heads, -1)[heads])


def softmax_with_sinks(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention weights `(B, H_kv, G, q, n)`; learned `sinks`, `H` in all, get a share."""
    if sinks is None:
        return logits.softmax(dim=-1)
    sink_terms = sinks.to(logits).view(1, logits.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sink_terms), dim=-1).softmax(dim=-1)[..., :-1]
