"""Which tokens to keep."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


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


def with_ends(scores: Tensor, first: int = 0, last: int = 0) -> Tensor:
    """Scores of all tokens, from those of the tokens between protected ends.

    Args:
        scores: `(B, H_kv, m)`, of the tokens between.
        first, last: how many tokens before and after these are protected.

    Returns:
        `(B, H_kv, first + m + last)`.
    """
    padded = pad(scores, (first, last)).unsqueeze(-1)
    return protect(padded.squeeze(-1), leading(padded, first) | trailing(padded, last))


def top_positions(scores: Tensor, n: int) -> Tensor:
    """Positions of the `n` best scores of each KV head, in temporal order.

    Args:
        scores: `(B, H_kv, S)`.
        n: tokens to keep, `1 <= n <= S`.

    Returns:
        `(B, H_kv, n)`, int64.
    """
    return true_indices(best_first(scores, n))


def best_first(scores: Tensor, n: int | Tensor) -> Tensor:
    """`(B, H_kv, S)` bool: the `n` best scores of each KV head; of equal ones the first.

    Args:
        scores: `(B, H_kv, S)`.
        n: the same for all heads, or `(B, H_kv, 1)`.
    """
    scores, length = scores.detach(), scores.shape[-1]
    if _is_readable(scores):
        return _best_on_cpu(upcast(scores), n)
    if isinstance(n, Tensor):
        least = scores.sort(dim=-1).values.gather(-1, length - n.long().clamp(min=1))
    else:
        least = scores.kthvalue(length + 1 - max(1, n), dim=-1, keepdim=True).values
    return _from(least, scores, n)


def _from(least: Tensor, scores: Tensor, n: int | Tensor) -> Tensor:
    """The `n` best scores of each head, of which `least` is the last."""
    better = scores > least
    equal = ~(better | (scores < least))  # NaN is the best, as sorting has it
    return better | (equal & (equal.cumsum(dim=-1) <= n - better.sum(dim=-1, keepdim=True)))


def _best_with_numpy(scores: Tensor, n: int | Tensor) -> Tensor:
    """`best_first` in a tenth of the time that torch takes."""
    known = scores.numpy()
    if isinstance(n, Tensor):
        last = known.shape[-1] - n.long().clamp(min=1).numpy()
        least = np.take_along_axis(np.sort(known, axis=-1), last, axis=-1)
        return _from(torch.from_numpy(least), scores, n)
    last = known.shape[-1] - max(1, n)
    least = np.partition(known, last, axis=-1)[..., last, None]
    chosen = ~(known < least)
    if np.count_nonzero(chosen) == n * least.size:  # no other is equal to the last
        return torch.from_numpy(chosen)
    return _from(torch.from_numpy(least), scores, n)


def _is_readable(x: Tensor) -> bool:
    """Whether numpy can read it: not on other devices, nor while a graph is traced for export."""
    return x.device.type == "cpu" and type(x) is Tensor


def true_indices(chosen: Tensor) -> Tensor:
    """Where `chosen` `(B, H_kv, S)` is true, as often in each head: `(B, H_kv, n)` int64."""
    batch, n_heads, length = chosen.shape
    flat = chosen.flatten()
    rows = _nonzero_on_cpu(flat) if _is_readable(flat) else flat.nonzero()
    return rows.view(batch, n_heads, -1) - _first_rows(batch, n_heads, length, chosen)


# Compilers give numpy's functions other meanings.
_best_on_cpu = torch.compiler.disable(_best_with_numpy)
_nonzero_on_cpu = torch.compiler.disable(lambda x: torch.from_numpy(x.numpy().nonzero()[0]))


def gather_tokens(states: Tensor, positions: Tensor) -> Tensor:
    """The states at `positions` of every KV head.

    Args:
        states: `(B, H, S, d)`; `H` is `H_kv`, or a multiple of it: each KV head's positions are
            then applied to all query heads of its group.
        positions: `(B, H_kv, n)`, int64.

    Returns:
        `(B, H, n, d)`.
    """
    return gather_each(positions, states)[0]


def gather_each(positions: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """`gather_tokens` from each of `states`, which differ in `d` alone."""
    batch, n_heads, length, _ = states[0].shape
    if n_heads != positions.shape[1]:
        positions = positions.repeat_interleave(n_heads // positions.shape[1], dim=1)
    # Whole rows at a time: `gather` would look up each channel, which takes ten times as long.
    rows = (positions + _first_rows(batch, n_heads, length, positions)).flatten()
    shape = *positions.shape, -1
    return tuple(x.reshape(-1, x.shape[-1]).index_select(0, rows).view(shape) for x in states)


def _first_rows(batch: int, n_heads: int, length: int, like: Tensor) -> Tensor:
    """`(B, H, 1)` int64: the first of each head's rows, where those of all heads follow."""
    end = batch * n_heads * length
    return torch.arange(0, end, length, device=like.device).view(batch, n_heads, 1)


def leading(keys: Tensor, n: int) -> Tensor:
    """`(S,)` bool: the first `n` tokens of `keys` `(B, H_kv, S, d)`."""
    return torch.arange(keys.shape[2], device=keys.device) < n


def trailing(keys: Tensor, n: int) -> Tensor:
    """`(S,)` bool: the last `n` tokens of `keys` `(B, H_kv, S, d)`."""
    return torch.arange(keys.shape[2], device=keys.device) >= keys.shape[2] - n
