"""Attention weights for scoring, grouped by KV head so that no key is repeated.

Weights are those of the model: its scaling, soft-capping and learned sinks take part, and tokens of
an image see later ones where they do in the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.model.sites import AttentionSite
from press_core.select import upcast


def window_attention(call: AttentionCall, window: int) -> Tensor:
    """Attention of the last `window` queries over all keys.

    Returns:
        `(B, H_kv, G, window, S)`, float32 (float64 for float64 states); every row sums to one
        (less what a learned sink takes).
    """
    queries = call.queries(window)
    return causal_weights(call.site, queries, call.keys, call.later_of(queries.shape[2]))


BLOCK = 2**21
"""Weights held at a time (8 MiB in float32): what is larger is asked of the system every time."""


def attention_blocks(call: AttentionCall, block: int | None = None) -> Iterator[Tensor]:
    """Attention of all (known) queries, `block` of them at a time: O(S) memory.

    The weights that the layer returned, where it did. By default as many queries at a time as make
    up `BLOCK` weights.

    Yields:
        `(B, H_kv, G, rows, end)` for the rows before `end`; keys from `end` on are not visible.
    """
    given = call.attentions
    queries = call.queries() if given is None else given
    batch, n_heads, n_queries = queries.shape[:3]
    older, n_kv = call.length - n_queries, call.keys.shape[1]
    block = block or max(1, BLOCK // (batch * n_heads * call.length))
    later, start = call.later_of(n_queries), 0
    while start < n_queries:
        stop = _closed(later, min(start + block, n_queries))
        end, part = older + stop, queries[:, :, start:stop]
        if given is None:
            among = None if later is None else later[..., start:stop, start:stop]
            yield causal_weights(call.site, part, call.keys[:, :, :end], among)
        else:
            yield upcast(part[..., :end]).unflatten(1, (n_kv, -1))
        start = stop


def _closed(later: Tensor | None, stop: int) -> int:
    """The first place from `stop` on such that no token before it sees one behind it."""
    while later is not None:
        columns = later[..., :stop, :].flatten(0, -2).any(dim=0).nonzero()
        reach = int(columns.max()) + 1 if len(columns) else 0
        if reach <= stop:
            break
        stop = reach
    return stop


def received_attention(call: AttentionCall) -> Tensor:
    """Attention that each key receives from the queries of this forward, mean over the group.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    received = torch.zeros_like(upcast(call.keys[..., 0]))
    for weights in attention_blocks(call):
        received[..., : weights.shape[-1]] += weights.sum(dim=3).mean(dim=2)
    return received


def causal_weights(
    site: AttentionSite, queries: Tensor, keys: Tensor, later: Tensor | None = None
) -> Tensor:
    """Weights of queries that are the last of the sequence which `keys` make up.

    Args:
        later: `(B, 1 or H_kv, rows, rows)` bool, which later ones each of them sees; None: none.
    """
    batch, n_heads, rows, d = queries.shape
    n_kv, length = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, n_kv, (n_heads // n_kv) * rows, d)
    logits = upcast(grouped @ keys.mT).mul_(site.scaling)
    if site.softcap is not None:
        logits = torch.tanh(logits / site.softcap) * site.softcap
    logits = logits.view(batch, n_kv, n_heads // n_kv, rows, length)
    future = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu(1)
    hidden = future if later is None else future & ~later.unsqueeze(2)
    logits[..., length - rows :].masked_fill_(hidden, float("-inf"))
    if site.sinks is None:
        return logits.softmax(dim=-1)
    sinks = site.sinks.to(logits).view(1, n_kv, -1, 1, 1).expand(batch, -1, -1, rows, 1)
    return torch.cat((logits, sinks), dim=-1).softmax(dim=-1)[..., :-1]
