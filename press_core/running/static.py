"""Static caches: buffers whose shape stays, so that a step compiles once.

What is kept stands at the front of a buffer that has room for as many tokens more as before. Counts
are kept twice: on the device, where they tell the slots to write to, and as numbers, so that a full
buffer is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from press_core.cache.kinds import KINDS
from press_core.cache.pruned import PrunedLayer
from press_core.cache.recent import AHEAD, Recent
from press_core.errors import UnsupportedCacheError


class Filled:
    """Keys and values `(..., room, d)` of which the first are filled.

    Attributes:
        used: how many slots are, and `START`; `filled` is the number of slots on the device.
    """

    START = 0
    keys: Any = None
    values: Any = None
    used: int
    filled: Tensor

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add states.

        Raises:
            UnsupportedCacheError: if there is no room for them.
        """
        n, room = keys.shape[-2], self.keys.shape[-2] + self.START - self.used
        if n > room:
            raise UnsupportedCacheError(
                f"the static cache is full: it has room for {room} tokens more, and {n} came; make "
                "it longer, StaticCache(config, max_cache_len=...), or use a DynamicCache"
            )
        slots = torch.arange(n, device=self.keys.device) + self.filled
        self.filled.add_(n)
        self.used += n
        self.keys.index_copy_(-2, slots, keys.to(self.keys.dtype))
        self.values.index_copy_(-2, slots, values.to(self.values.dtype))

    def drop_last(self, n: int) -> None:
        self.used -= n
        self.filled.sub_(n)

    def seen_of_buffer(self, n_queries: int, n: int, n_held: int) -> Tensor:
        """Which of `n` slots each of the latest queries sees, `(q, n)` bool.

        Args:
            n_held: how many slots to leave out before them, and of their own tokens.
        """
        slots, queries = (torch.arange(m, device=self.filled.device) for m in (n, n_queries))
        return slots <= self.filled - n_held + queries[:, None]


class Buffer(Filled):
    """Keys and values `(B, H_kv, room, d)`.

    Attributes:
        whole: as many slots as the cache was made with.
    """

    is_initialized = False
    offload, prefetch = CacheLayerMixin.offload, CacheLayerMixin.prefetch

    def __init__(self, size: int, whole: int) -> None:
        self.max_cache_len, self.whole, self.used = size, whole, 0
        self.filled = torch.zeros((), dtype=torch.int64)

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        """Make room for states like these."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys, self.values = (
            x.new_zeros(*x.shape[:2], self.max_cache_len, x.shape[-1]) for x in (keys, values)
        )
        self.filled = self.filled.to(keys.device)
        mark_static(self.keys, self.values, self.filled)

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Hold these alone, `(B, H_kv, n, d)`."""
        self.used = keys.shape[2]
        self.filled.fill_(self.used)
        self.keys[:, :, : self.used], self.values[:, :, : self.used] = keys, values

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append states; returns the whole buffers."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.append(keys, values)
        return self.keys, self.values


def mark_static(*tensors: Tensor) -> None:
    """Let CUDA graphs know that these stay where they are."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)


class PrunedStaticLayer(PrunedLayer):
    """A pruned layer in a buffer; it counts with tensors, as static layers of `transformers` do.

    What it stands for is a `StaticLayer` that nothing was evicted from, or a `Buffer`.
    """

    is_always_masked = True
    is_compileable = True

    @property
    def n_slots(self) -> int:
        if not self.is_initialized:
            return 0
        return self.inner.used if isinstance(self.inner, Buffer) else int(self.get_seq_length())

    def columns(self, n_new: int) -> int:
        return int(self.max_cache_len)

    def states(self) -> tuple[Tensor, Tensor]:
        n = self.n_slots
        return self.keys[:, :, :n], self.values[:, :, :n]

    def holding(self, keys: Tensor, values: Tensor) -> PrunedLayer:
        n, size = keys.shape[2], int(self.max_cache_len)
        if isinstance(self.inner, Buffer) and n <= size:  # in place: nothing is allocated
            buffer = self.inner
        else:
            buffer = Buffer(n + size - self.n_slots, size)
            buffer.lazy_initialization(keys, values)
        buffer.fill(keys, values)
        return PrunedStaticLayer(buffer)

    def emptied(self) -> Buffer:
        return Buffer(self.get_max_length(), self.get_max_length())

    def check_shape(self, left: str) -> None:
        if "channels" in left or "later" in left:  # buffers have one width, and one start
            raise UnsupportedCacheError(
                f"the press keeps {left}, which a static cache cannot store; use a DynamicCache"
            )

    def seen_of_buffer(self, n_queries: int, n: int, n_held: int) -> Tensor:
        seen: Tensor = self.inner.seen_of_buffer(n_queries, n, n_held + self.n_old)
        return seen

    def recent_like(self, keys: Tensor, values: Tensor) -> Recent:
        n, room = keys.shape[0] * keys.shape[1], self.max_cache_len - self.n_slots
        return StaticRecent(*(x.new_zeros(n, room, x.shape[-1]) for x in (keys, values)))

    def drop_last(self, n: int) -> None:
        self.inner.drop_last(n)

    def select_rows(self, rows: Tensor) -> None:
        rows = rows.to(self.keys.device)
        self.keys, self.values = self.keys[rows], self.values[rows]

    def reorder_rows(self, rows: Tensor) -> None:
        self.select_rows(rows)

    def get_seq_length(self) -> Any:
        if not self.is_initialized:
            return 0
        filled = getattr(self.inner, "filled", None)
        if filled is None:  # nothing was evicted yet
            return self.inner.get_seq_length()
        shift = 0 if self.rerotation is None else self.rerotation.shift
        return filled + (self.kept.n_seen - shift - self.kept.n_slots)

    def get_max_length(self) -> int:
        """As many tokens as the cache was made for."""
        return int(getattr(self.inner, "whole", self.max_cache_len))

    get_max_cache_shape = get_max_length  # of transformers 5.2


class StaticRecent(Filled, Recent):
    """Tokens behind heads of different lengths, in buffers `(N, room, d)`."""

    is_static = True
    START = AHEAD

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.used = keys, values, AHEAD
        self.filled = torch.zeros((), dtype=torch.int64, device=keys.device)
        mark_static(keys, values, self.filled)

    @property
    def n(self) -> int:
        return self.used - AHEAD

    def states(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def clear(self) -> None:
        self.drop_last(self.n)

    def count(self, n_seen: int) -> Any:
        return self.filled + n_seen

    def mask_columns(self, n_seen: int, n_new: int) -> int:
        return n_seen + int(self.keys.shape[1])


KINDS[StaticLayer] = PrunedStaticLayer
