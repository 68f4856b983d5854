"""How many tokens to keep, and which."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from press_core.errors import HyperparameterError


@dataclass(frozen=True)
class Tokens:
    """A number of tokens to keep, where otherwise a share to evict is said.

    Contexts of no more tokens are left whole.

    Attributes:
        n: tokens that each KV head keeps, on average where heads differ.
        progress: how far a press goes towards `n`, where others go on from there: of `S` tokens it
            keeps `S**(1 - progress) * n**progress`.
    """

    n: int
    progress: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.n, int) and self.n >= 1 and 0 <= self.progress <= 1):
            raise HyperparameterError(f"{self}: a budget must be a number of tokens, 1 or more")

    def __repr__(self) -> str:
        return f"Tokens({self.n})" if self.progress == 1 else f"Tokens({self.n}, {self.progress})"

    def of(self, length: int) -> int:
        """How many of `length` tokens are kept."""
        if length <= self.n:
            return length
        return max(self.n, round(length * (self.n / length) ** self.progress))


Amount = float | Tokens
"""A compression ratio in [0, 1), or the number of tokens that are left."""


def is_amount(value: object) -> bool:
    """Whether `value` is a compression ratio in its range, or a number of tokens."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, Tokens) or (is_number and 0 <= float(value) < 1)  # type: ignore[arg-type]


def n_kept(length: int, amount: Amount) -> int:
    """Number of tokens that each KV head keeps of `length`; never zero."""
    if isinstance(amount, Tokens):
        return amount.of(length)
    return max(1, int(length * (1 - amount)))


def ratio_of(length: int, amount: Amount) -> float:
    """Share of `length` tokens that `amount` says to evict."""
    return 1 - amount.of(length) / length if isinstance(amount, Tokens) else amount


def kept_of_chunks(length: int, step: int, amount: Amount) -> list[int]:
    """Numbers of tokens to keep of each `step` of `length`, where each is pruned by itself."""
    starts = range(0, length, step)
    if not isinstance(amount, Tokens):
        return [n_kept(min(step, length - start), amount) for start in starts]
    ends = [amount.of(length) * min(start + step, length) // length for start in starts]
    return [max(1, end - before) for before, end in zip([0, *ends], ends, strict=False)]


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
    if _has_numbers_at_hand(scores):
        return _top_on_cpu(upcast(scores).detach(), n)
    return places(best_first(scores, n))


def best_first(scores: Tensor, n: int | Tensor) -> Tensor:
    """`(B, H_kv, S)` bool: the `n` best scores of each KV head; on a CPU, of equal ones the first.

    Args:
        scores: `(B, H_kv, S)`.
        n: the same for all heads, or `(B, H_kv, 1)`.
    """
    if _has_numbers_at_hand(scores):
        return _best_on_cpu(upcast(scores).detach(), n)
    if isinstance(n, int):
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        return chosen.scatter_(-1, scores.topk(n, dim=-1, sorted=False).indices, True)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, places < n)


def _best(scores: Tensor, n: int | Tensor) -> Tensor:
    """`best_first` with numpy, whose `partition` takes an eighth of the time of torch's `topk`."""
    known, length = scores.numpy(), scores.shape[-1]
    if isinstance(n, int):
        least, n_best = _least_of_best(known, n), n * (known.size // length)
    else:
        n = n.expand(*scores.shape[:-1], 1)
        heads = zip(known.reshape(-1, length), n.flatten().tolist(), strict=True)
        least = np.concatenate([_least_of_best(*head) for head in heads]).reshape(n.shape)
        n_best = int(n.sum())
    chosen = ~(known < least)  # NaN is the best, as `partition` has it
    if np.count_nonzero(chosen) == n_best:
        return torch.from_numpy(chosen)
    better = scores > torch.from_numpy(least)
    equal = ~better & ~(scores < torch.from_numpy(least))
    return better | (equal & (equal.cumsum(dim=-1) <= n - better.sum(dim=-1, keepdim=True)))


def _least_of_best(scores: NDArray[Any], n: int) -> NDArray[Any]:
    """The `n`-th best of `scores` `(..., S)`, `(..., 1)`; infinity for none."""
    if n == 0:
        return np.full((*scores.shape[:-1], 1), np.inf, scores.dtype)
    parted = scores.copy()
    parted.partition(scores.shape[-1] - n, axis=-1)
    return parted[..., -n, None]


def places(chosen: Tensor) -> Tensor:
    """Where `chosen` `(B, H_kv, S)` is true, as often in each head: `(B, H_kv, n)` int64."""
    if _has_numbers_at_hand(chosen):
        return _places_on_cpu(chosen)
    batch, n_heads, length = chosen.shape
    rows = chosen.flatten().nonzero().view(batch, n_heads, -1)
    return rows - _first_rows(batch, n_heads, length, chosen)


def _places(chosen: Tensor) -> Tensor:
    """`places` with numpy, which takes half of the time."""
    batch, n_heads, length = chosen.shape
    rows = chosen.numpy().reshape(-1).nonzero()[0].reshape(batch, n_heads, -1)
    firsts = np.arange(0, batch * n_heads * length, length).reshape(batch, n_heads, 1)
    return torch.from_numpy(rows - firsts)


def _has_numbers_at_hand(x: Tensor) -> bool:
    """Whether numpy can read it: not on other devices, nor while a graph is traced for export."""
    return x.device.type == "cpu" and type(x) is Tensor


# The compiler would give numpy's functions other meanings.
_best_on_cpu = torch.compiler.disable(_best)
_places_on_cpu = torch.compiler.disable(_places)
_top_on_cpu = torch.compiler.disable(lambda scores, n: _places(_best(scores, n)))


def gather_tokens(states: Tensor, positions: Tensor) -> Tensor:
    """The states at `positions` of every KV head.

    Args:
        states: `(B, H, S, d)`; `H` is `H_kv`, or a multiple of it: each KV head's positions are
            then applied to all query heads of its group.
        positions: `(B, H_kv, n)`, int64.

    Returns:
        `(B, H, n, d)`.
    """
    return gather_alike(positions, states)[0]


def gather_alike(positions: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
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
