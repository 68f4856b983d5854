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
    return scores.topk(n, dim=-1, sorted=False).indices.sort(dim=-1).values


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
    groups = states.shape[1] // positions.shape[1]
    index = positions.repeat_interleave(groups, dim=1)
    return states.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, states.shape[-1]))


def leading(keys: Tensor, n: int) -> Tensor:
    """`(S,)` bool: the first `n` tokens of `keys` `(B, H_kv, S, d)`."""
    return torch.arange(keys.shape[2], device=keys.device) < n


def trailing(keys: Tensor, n: int) -> Tensor:
    """`(S,)` bool: the last `n` tokens of `keys` `(B, H_kv, S, d)`."""
    return torch.arange(keys.shape[2], device=keys.device) >= keys.shape[2] - n
