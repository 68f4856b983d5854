"""Static caches: buffers whose shape stays, so that a step compiles once.

What is kept stands at the front of a buffer that has room for as many tokens more as before. Counts
are kept twice: on the device, where they tell the slots to write to, and as numbers, so that a full
buffer is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from press_core.cache.pruned import LAYERS, PrunedLayer
from press_core.cache.recent import AHEAD, Recent
from press_core.cache.storage import KINDS, Storage
from press_core.errors import UnsupportedCacheError


class Buffer:
    """Keys and values `(B, H_kv, room, d)` of which the first are filled.

    Attributes:
        used: how many slots are filled; `filled` is the same on the device.
        whole: as many slots as the cache was made with.
    """

    is_initialized = False
    keys: Any = None
    values: Any = None

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
        """Append states; returns the whole buffers.

        Raises:
            UnsupportedCacheError: if there is no room for them.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        n = keys.shape[2]
        require_room(n, self.max_cache_len - self.used)
        slots = torch.arange(n, device=self.keys.device) + self.filled
        self.filled.add_(n)
        self.used += n
        self.keys.index_copy_(2, slots, keys.to(self.keys.dtype))
        self.values.index_copy_(2, slots, values.to(self.values.dtype))
        return self.keys, self.values

    def offload(self) -> None:
        """Move to the CPU."""
        self.keys, self.values = self.keys.cpu(), self.values.cpu()

    def prefetch(self) -> None:
        """Move back."""
        self.keys, self.values = self.keys.to(self.device), self.values.to(self.device)


def require_room(n: int, room: int) -> None:
    """Refuse more tokens than there is room for."""
    if n > room:
        raise UnsupportedCacheError(
            f"the static cache is full: it has room for {room} tokens more, and {n} came; make it "
            "longer, StaticCache(config, max_cache_len=...), or use a DynamicCache"
        )


def mark_static(*tensors: Tensor) -> None:
    """Let CUDA graphs know that these stay where they are."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)


class StaticStorage(Storage):
    """Of a `StaticLayer` that nothing was evicted from, or of a `Buffer`."""

    is_always_masked = True

    @property
    def _size(self) -> int:
        return int(self.layer.max_cache_len)

    @property
    def n_slots(self) -> int:
        if not self.layer.is_initialized:
            return 0
        return (
            self.layer.used if isinstance(self.layer, Buffer) else int(self.layer.get_seq_length())
        )

    def columns(self, n_new: int) -> int:
        return self._size

    def states(self) -> tuple[Tensor, Tensor]:
        n = self.n_slots
        return self.layer.keys[:, :, :n], self.layer.values[:, :, :n]

    def holding(self, keys: Tensor, values: Tensor) -> Storage:
        n, room = keys.shape[2], self._size - self.n_slots
        if isinstance(self.layer, Buffer) and n <= self._size:  # in place: nothing is allocated
            buffer = self.layer
        else:
            buffer = Buffer(n + room, self._size)
            buffer.lazy_initialization(keys, values)
        buffer.fill(keys, values)
        return StaticStorage(buffer)

    def emptied(self) -> Storage:
        whole = self.layer.whole if isinstance(self.layer, Buffer) else self._size
        return StaticStorage(Buffer(whole, whole))

    def of_other_shape(self, left: str) -> Storage:
        if "channels" in left or "later" in left:  # buffers have one width, and one start
            raise UnsupportedCacheError(
                f"the press keeps {left}, which a static cache cannot store; use a DynamicCache"
            )
        return self

    def seen_of_buffer(self, n_old: int, n_queries: int, n: int, n_held: int) -> Tensor:
        before = self.layer.filled - n_held - n_old
        return seen_of_filled(before, n_queries, n)

    def recent(self, n: int, keys: Tensor, values: Tensor) -> Recent:
        room = self._size - self.n_slots
        return StaticRecent(*(x.new_zeros(n, room, x.shape[-1]) for x in (keys, values)))

    def drop_last(self, n: int) -> None:
        self.layer.used -= n
        self.layer.filled.sub_(n)

    def select_rows(self, rows: Tensor) -> None:
        layer, index = self.layer, rows.to(self.layer.keys.device)
        layer.keys, layer.values = layer.keys[index], layer.values[index]

    def reorder(self, rows: Tensor) -> None:
        self.select_rows(rows)


def seen_of_filled(before: Tensor, n_queries: int, n: int) -> Tensor:
    """`(q, n)` bool: which of `n` slots each query sees, where `before` were filled before them."""
    slots = torch.arange(n, device=before.device)
    return slots <= before + torch.arange(n_queries, device=before.device)[:, None]


class StaticRecent(Recent):
    """Tokens behind heads of different lengths, in buffers `(N, room, d)`."""

    is_static = True

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.used = keys, values, AHEAD
        self.filled = torch.zeros((), dtype=torch.int64, device=keys.device)
        mark_static(keys, values, self.filled)

    @property
    def n(self) -> int:
        return self.used - AHEAD

    def states(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def seen_of_buffer(self, n_queries: int, n: int, n_held: int) -> Tensor:
        return seen_of_filled(self.filled - n_held, n_queries, n)

    def append(self, keys: Tensor, values: Tensor) -> None:
        n = keys.shape[1]
        require_room(n, self.keys.shape[1] - self.n)
        slots = torch.arange(n, device=self.keys.device) + self.filled
        self.filled.add_(n)
        self.used += n
        self.keys.index_copy_(1, slots, keys.to(self.keys.dtype))
        self.values.index_copy_(1, slots, values.to(self.values.dtype))

    def drop_last(self, n: int) -> None:
        self.used -= n
        self.filled.sub_(n)

    def clear(self) -> None:
        self.drop_last(self.n)

    def count(self, n_seen: int) -> Any:
        return self.filled + n_seen

    def mask_columns(self, n_seen: int, n_new: int) -> int:
        return n_seen + int(self.keys.shape[1])


class PrunedStaticLayer(PrunedLayer):
    """A pruned layer in a buffer; it counts with tensors, as static layers of `transformers` do."""

    is_compileable = True

    def get_seq_length(self) -> Any:
        if not self.is_initialized:
            return 0
        shift = 0 if self.rerotation is None else self.rerotation.shift
        filled = getattr(self.storage.layer, "filled", None)
        if filled is None:  # nothing was evicted yet
            return self.storage.layer.get_seq_length()
        return filled + (self.kept.n_seen - shift - self.kept.n_slots)

    def get_max_length(self) -> int:
        """As many tokens as the cache was made for."""
        return int(getattr(self.storage.layer, "whole", self.storage.layer.max_cache_len))

    get_max_cache_shape = get_max_length  # of transformers 5.2


KINDS[StaticLayer] = StaticStorage
LAYERS[StaticStorage] = PrunedStaticLayer
