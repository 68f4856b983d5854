"""Selecting the tokens to keep, and gathering their states."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


def upcast(x: Tensor) -> Tensor:
    """`x` in float32; float64 stays float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def protect(scores: Tensor, protected: Tensor, gap: float = 1) -> Tensor:
    """Raise the scores of protected tokens above all others.

    Protected tokens are ranked by recency, so that a budget smaller than their number keeps the
    latest ones.

    Args:
        scores: `(B, H_kv, S)`, finite, floating point.
        protected: `(S,)`, bool.
        gap: how far above the others they are at least.
    """
    length = scores.shape[-1]
    recency = torch.arange(1, length + 1, device=scores.device, dtype=scores.dtype) / length
    return raised(scores, protected, gap * (1 + recency))


def raised(scores: Tensor, chosen: Tensor, order: Tensor) -> Tensor:
    """Scores `(B, H_kv, S)`, those of `chosen` tokens above all others, by `order`, above 0."""
    top = scores.amax(dim=(1, 2), keepdim=True)
    # Relative to the largest score, so that rounding keeps the order of chosen tokens.
    return torch.where(chosen, top + (1 + top.abs()) * order, scores)


def with_ends(scores: Tensor, first: int = 0, last: int = 0, gap: float = 1) -> Tensor:
    """Extend the scores of tokens in the middle to all tokens, with both ends protected.

    Args:
        scores: `(B, H_kv, m)`, of the tokens in the middle.
        first, last: number of protected tokens before and after them.
        gap: see `protect`.

    Returns:
        `(B, H_kv, first + m + last)`.
    """
    padded = pad(scores, (first, last)).unsqueeze(-1)
    return protect(padded.squeeze(-1), leading(padded, first) | trailing(padded, last), gap)


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
    """Mask `(B, H_kv, S)` bool of the `n` best scores of each KV head; ties go to the first tokens.

    Args:
        scores: `(B, H_kv, S)`.
        n: the same number for all heads, or `(B, H_kv, 1)`.
    """
    scores, length = scores.detach(), scores.shape[-1]
    if is_readable(scores):
        return _best_on_cpu(upcast(scores), n)
    if isinstance(n, Tensor):
        least = scores.sort(dim=-1).values.gather(-1, length - n.long().clamp(min=1))
    else:
        least = scores.kthvalue(length + 1 - max(1, n), dim=-1, keepdim=True).values
    return _from(least, scores, n)


def _from(least: Tensor, scores: Tensor, n: int | Tensor) -> Tensor:
    """Mask of the `n` best scores of each head, the lowest of which is `least`."""
    better = scores > least
    equal = ~(better | (scores < least))  # NaN ranks highest, as in sorting
    return better | (equal & (equal.cumsum(dim=-1) <= n - better.sum(dim=-1, keepdim=True)))


def _best_with_numpy(scores: Tensor, n: int | Tensor) -> Tensor:
    """`best_first` with numpy, which takes a tenth of the time of torch."""
    known = scores.numpy(force=True)
    if isinstance(n, Tensor):
        last = known.shape[-1] - n.long().clamp(min=1).numpy()
        least = np.take_along_axis(np.sort(known, axis=-1), last, axis=-1)
        return _from(torch.from_numpy(least), scores, n)
    last = known.shape[-1] - max(1, n)
    least = np.partition(known, last, axis=-1)[..., last, None]
    chosen = ~(known < least)
    if np.count_nonzero(chosen) == n * least.size:  # no ties at the lowest kept score
        return torch.from_numpy(chosen)
    return _from(torch.from_numpy(least), scores, n)


def is_dense(given: Any, like: Tensor) -> bool:
    """Whether `given` is a tensor to use with `like`: on its device, neither sparse nor nested."""
    is_tensor = isinstance(given, Tensor) and not given.is_nested
    return is_tensor and (given.layout, given.device) == (like.layout, like.device)


def is_readable(x: Tensor) -> bool:
    """Whether numpy can read `x`: it is on the CPU, and no transform or export is tracing it."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return x.device.type == "cpu" and type(x) is Tensor and not wrapped


def true_indices(chosen: Tensor) -> Tensor:
    """Indices of the true values of `chosen` `(B, H_kv, S)`, `n` per head: `(B, H_kv, n)` int64."""
    batch, n_heads, length = chosen.shape
    flat = chosen.flatten()
    rows = _nonzero_on_cpu(flat) if is_readable(flat) else flat.nonzero()
    return rows.view(batch, n_heads, -1) - _first_rows(batch, n_heads, length, chosen)


# Compilers would trace numpy's functions as functions of torch.
_best_on_cpu = torch.compiler.disable(_best_with_numpy)
_nonzero_on_cpu = torch.compiler.disable(lambda x: torch.from_numpy(x.numpy().nonzero()[0]))


def gather_tokens(states: Tensor, positions: Tensor) -> Tensor:
    """The states at `positions` of every KV head.

    Args:
        states: `(B, H, S, d)`; `H` is `H_kv`, or a multiple of it: all query heads of a GQA group
            then use the positions of their KV head.
        positions: `(B, H_kv, n)`, int64.

    Returns:
        `(B, H, n, d)`.
    """
    return gather_each(positions, states)[0]


def gather_each(positions: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """`gather_tokens` from each of `states`, whose shapes may differ in `d` only."""
    batch, n_heads, length, _ = states[0].shape
    if n_heads != positions.shape[1]:
        positions = positions.repeat_interleave(n_heads // positions.shape[1], dim=1)
    # Copies whole rows: `gather` looks up each channel, which takes ten times as long.
    rows = (positions + _first_rows(batch, n_heads, length, positions)).flatten()
    shape = *positions.shape, -1
    return tuple(x.reshape(-1, x.shape[-1]).index_select(0, rows).view(shape) for x in states)


def _first_rows(batch: int, n_heads: int, length: int, like: Tensor) -> Tensor:
    """`(B, H, 1)` int64: index of each head's first row in states flattened to `(B * H * S, d)`."""
    end = batch * n_heads * length
    return torch.arange(0, end, length, device=like.device).view(batch, n_heads, 1)


def leading(keys: Tensor, n: int) -> Tensor:
    """Mask `(S,)` bool of the first `n` tokens of `keys` `(B, H_kv, S, d)`."""
    return torch.arange(keys.shape[2], device=keys.device) < n


def trailing(keys: Tensor, n: int) -> Tensor:
    """Mask `(S,)` bool of the last `n` tokens of `keys` `(B, H_kv, S, d)`."""
    return torch.arange(keys.shape[2], device=keys.device) >= keys.shape[2] - n
