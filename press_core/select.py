"""How many tokens to keep, and which."""

from __future__ import annotations

import torch
from torch import Tensor


def n_kept(length: int, compression_ratio: float) -> int:
    """Number of tokens that each KV head keeps of `length`; never zero."""
    return max(1, int(length * (1 - compression_ratio)))


def upcast(x: Tensor) -> Tensor:
    """`x` in float32, or as it is where it is at least that precise already."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def protect(scores: Tensor, protected: Tensor) -> Tensor:
    """Raise the scores of protected tokens above all others.

    Among themselves protected tokens rank by recency, so that a budget smaller than their number
    keeps the latest of them.

    Args:
        scores: `(B, H_kv, S)`, floating point.
        protected: `(S,)`, bool.
    """
    length = scores.shape[-1]
    recency = torch.arange(1, length + 1, device=scores.device, dtype=scores.dtype) / length
    top = scores.amax(dim=(1, 2), keepdim=True)
    # A share of the largest score, so that the ranks among the protected survive rounding.
    return torch.where(protected, top + (1 + top.abs()) * recency, scores)


def top_positions(scores: Tensor, n: int) -> Tensor:
    """Positions of the `n` best scores of each KV head, in temporal order.

    Args:
        scores: `(B, H_kv, S)`.
        n: tokens to keep, `1 <= n <= S`.

    Returns:
        `(B, H_kv, n)`, int64.
    """
    chosen = best_first(scores, n)
    # Each goes to the place that those before it leave, which takes a third of what sorting does;
    # all others share one place behind them.
    places = chosen.cumsum(dim=-1).sub_(1).masked_fill_(~chosen, n)
    tokens = torch.arange(scores.shape[-1], device=scores.device).expand_as(places)
    return tokens.new_empty(*scores.shape[:2], n + 1).scatter_(-1, places, tokens)[..., :n]


def best_first(scores: Tensor, n: int | Tensor) -> Tensor:
    """`(B, H_kv, S)` bool: the `n` best scores of each KV head.

    Args:
        scores: `(B, H_kv, S)`.
        n: the same for all heads, or `(B, H_kv, 1)`.
    """
    if isinstance(n, int):
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        return chosen.scatter_(-1, scores.topk(n, dim=-1, sorted=False).indices, True)
    order = scores.argsort(dim=-1, descending=True)
    places = torch.arange(scores.shape[-1], device=scores.device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, places < n)


def gather_tokens(states: Tensor, positions: Tensor) -> Tensor:
    """The states at `positions` of every KV head.

    Args:
        states: `(B, H, S, d)`; `H` is `H_kv`, or a multiple of it: each KV head's positions are
            then applied to all query heads of its group.
        positions: `(B, H_kv, n)`, int64.

    Returns:
        `(B, H, n, d)`.
    """
    batch, n_heads, length, d = states.shape
    positions = positions.repeat_interleave(n_heads // positions.shape[1], dim=1)
    heads = torch.arange(batch * n_heads, device=states.device).view(batch, n_heads, 1)
    # Whole rows at a time: `gather` would look up each channel, which takes ten times as long.
    rows = (positions + heads * length).flatten()
    return states.reshape(-1, d).index_select(0, rows).view(*positions.shape, d)


def leading(keys: Tensor, n: int) -> Tensor:
    """`(S,)` bool: the first `n` tokens of `keys` `(B, H_kv, S, d)`."""
    return torch.arange(keys.shape[2], device=keys.device) < n


def trailing(keys: Tensor, n: int) -> Tensor:
    """`(S,)` bool: the last `n` tokens of `keys` `(B, H_kv, S, d)`."""
    return torch.arange(keys.shape[2], device=keys.device) >= keys.shape[2] - n
