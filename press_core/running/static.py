"""Static caches: buffers of fixed shape, so that a decode step compiles once.

Kept tokens are stored at the front of a buffer with room for as many further tokens as before the
pruning. The number of filled slots is stored twice: as a tensor on the device, to compute the slots
to write to, and as an int, to raise when the buffer is full. A compiled step on a GPU counts on the
device alone, unless it asks for the int, and leaves the error to the device.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from press_core.cache.caches import KINDS, PrunedHybridLayer
from press_core.cache.pruned import PrunedLayer
from press_core.errors import UnsupportedCacheError
from press_core.forward import Forward
from press_core.model.graphs import may_be_replayed, stay_in_place
from press_core.scope import ScopeState
from press_core.traits import Evicts, Phase


def require_room(scope: ScopeState, forward: Forward) -> None:
    """Raise if tokens do not fit into static layers that nothing was evicted from.

    Torch's own error says only an index. A pruned layer may be pruned again first, to make room.
    """
    # Where one scope prunes by chunk, each makes room for others.
    by_chunk = any([other.traits.phases & Phase.CHUNKS for other in scope.on_layers.by_scope])
    n = forward.n_tokens + (0 if by_chunk else forward.n_remaining)
    kinds = StaticLayer, PrunedStaticLayer
    layers = [layer for layer in getattr(forward.cache, "layers", []) if isinstance(layer, kinds)]
    length = next((_length(layer) for layer in layers if not layer.is_sliding), None)
    # A sliding layer of this length slides only if its window is as long; else it gets full.
    slides = length == getattr(getattr(scope.decoder, "config", None), "sliding_window", None)
    filling = [layer for layer in layers if not (slides and layer.is_sliding)]
    whole = [x for x in filling if isinstance(x, StaticLayer) and x.max_cache_len == length]
    for layer in whole[:1]:  # all of them have seen the same tokens
        _require_room(n, layer.max_cache_len - int(_filled(layer)))


def _require_room(n: int, room: int) -> None:
    if n > room:
        raise UnsupportedCacheError(
            f"the static cache is full: it has room for {room} tokens, and {n} are appended; "
            "make it longer, StaticCache(config, max_cache_len=...), or use a DynamicCache"
        )


class Buffer:
    """Keys and values `(B, H_kv, room, d)` whose first slots are filled.

    Attributes:
        filled: number of filled slots, on the device; `used` is the same number.
        whole: number of tokens that the cache was made for.
    """

    is_initialized = True
    _used: int | None
    offload, prefetch = CacheLayerMixin.offload, CacheLayerMixin.prefetch

    def __init__(self, like: PrunedStaticLayer, keys: Tensor, values: Tensor) -> None:
        """Store `keys` and `values` `(B, H_kv, n, d)`, with room for as many more as in `like`."""
        n_free = like.max_cache_len - like.n_slots
        self.keys: Any = pad(keys, (0, 0, 0, n_free))
        self.values: Any = pad(values, (0, 0, 0, n_free))
        self.dtype, self.device, self.whole = keys.dtype, keys.device, like.get_max_length()
        self.filled = torch.tensor(keys.shape[-2], device=keys.device)
        self._count(keys.shape[-2])
        stay_in_place(self.keys, self.values, self.filled)

    @property
    def used(self) -> int:
        """Number of filled slots."""
        if self._used is None:
            self._used = int(self.filled)
        self._is_asked = torch.compiler.is_compiling()
        return self._used

    def _count(self, used: int | None) -> None:
        """Store the number of filled slots; None: to be read from the device when it is asked."""
        self._used, self._is_asked = used, False

    @property
    def max_cache_len(self) -> int:
        return int(self.keys.shape[-2])

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Replace the contents by `keys` and `values` `(B, H_kv, n, d)`."""
        n = keys.shape[2]
        self._count(n)
        self.filled.fill_(n)
        for own, given in ((self.keys, keys), (self.values, values)):
            is_part = given.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
            own[:, :, :n] = given.clone() if is_part else given

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append states; returns the whole buffers.

        Raises:
            UnsupportedCacheError: if the buffer is full.
        """
        n = keys.shape[-2]
        if may_be_replayed(self.keys) and not self._is_asked:
            self._count(None)
        else:
            _require_room(n, self.max_cache_len - self.used)
            self._count(self.used + n)
        slots = torch.arange(n, device=self.keys.device) + self.filled
        self.filled.add_(n)
        self.keys.index_copy_(-2, slots, keys.to(self.keys.dtype))
        self.values.index_copy_(-2, slots, values.to(self.values.dtype))
        return self.keys, self.values

    def crop(self, tokens: int) -> None:
        """Remove the last tokens; `tokens` is minus their number."""
        self._count(self.used + tokens)
        self.filled.add_(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        rows = beam_idx.to(self.keys.device)
        self.keys, self.values = self.keys[rows], self.values[rows]
        stay_in_place(self.keys, self.values)


def _filled(layer: Any) -> Any:
    """Number of filled slots of a `StaticLayer`."""
    if hasattr(layer, "cumulative_length") or not layer.is_initialized:
        return layer.get_seq_length()
    # transformers 5.2 counts keys of the first row that are not zero, as those of padding may be.
    filled = layer.keys[:, 0].any(dim=-1).any(dim=0)
    return (filled * torch.arange(1, len(filled) + 1, device=filled.device)).max()


def _length(layer: Any) -> int:
    """Number of tokens that a static layer was made for."""
    return int(getattr(layer, "whole", layer.max_cache_len))


class PrunedStaticLayer(PrunedLayer):
    """A pruned layer in a buffer; its lengths are tensors, as in static layers of `transformers`.

    It wraps a `StaticLayer` that nothing was evicted from, or a `Buffer`.

    Attributes:
        buffer: class attribute; the kind of buffer that takes the place of the wrapped layer.
    """

    buffer: type[Buffer] = Buffer
    stores = Evicts.PER_HEAD
    storage = "a static cache holds all channels of the keys, and heads that lose no tokens later"

    @property
    def n_slots(self) -> int:
        return self.inner.used if isinstance(self.inner, Buffer) else int(_filled(self.inner))

    @property
    def n_counted(self) -> Any:
        filled = self.inner.filled if isinstance(self.inner, Buffer) else _filled(self.inner)
        return filled - self.kept.n_slots  # a new tensor: the model adds to the other in place

    @property
    def room(self) -> int:
        return int(self.max_cache_len) - self.kept.n_slots

    def update(self, key_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not (isinstance(self.inner, Buffer) or torch.compiler.is_compiling()):
            _require_room(key_states.shape[-2], self.max_cache_len - self.n_slots)
        return super().update(key_states, *args, **kwargs)

    def states(self) -> tuple[Tensor, Tensor]:
        n = self.n_slots
        return self.keys[:, :, :n], self.values[:, :, :n]

    def holding(self, keys: Tensor, values: Tensor) -> PrunedLayer:
        if isinstance(self.inner, Buffer) and keys.shape[2] <= self.max_cache_len:
            self.inner.fill(keys, values)  # in place, without allocating
            return type(self)(self.inner)
        return self.beginning(keys, values)

    def beginning(self, keys: Tensor, values: Tensor) -> PrunedLayer:
        return type(self)(self.buffer(self, keys, values))

    def stop_sharing(self) -> None:
        if isinstance(self.inner, Buffer):
            self.inner = copy(self.inner)
            self.inner.keys, self.inner.values = self.keys.clone(), self.values.clone()
            stay_in_place(self.inner.keys, self.inner.values)

    def emptied(self) -> StaticLayer:
        return StaticLayer(self.get_max_length())

    def drop_last(self, n: int) -> None:
        if not hasattr(self.inner, "crop"):  # before transformers 5.24
            raise UnsupportedCacheError(
                "a static layer that nothing was evicted from cannot be cropped; use a DynamicCache"
            )
        self.inner.crop(-n)

    def get_max_length(self) -> int:
        """Number of tokens that the cache was made for."""
        return _length(self)

    get_max_cache_shape = get_max_length  # of transformers 5.2


KINDS[StaticLayer] = PrunedStaticLayer
StaticHybridLayer: Any = getattr(cache_utils, "LinearAttentionAndStaticFullAttentionLayer", None)
"""Layer with a buffer and a linear-attention state; transformers 5.2 does not have it."""

if StaticHybridLayer is not None:

    class HybridBuffer(Buffer, StaticHybridLayer):
        """A buffer beside the state of a linear attention."""

        def __init__(self, like: PrunedStaticLayer, *states: Tensor) -> None:
            self.__dict__.update(vars(like.inner))
            super().__init__(like, *states)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            cache_utils.LinearAttentionLayer.reorder_cache(self, beam_idx)

    class PrunedStaticHybridLayer(PrunedHybridLayer, PrunedStaticLayer):
        """A pruned layer in a buffer that also stores the state of a linear attention."""

        buffer = HybridBuffer

        def emptied(self) -> Any:
            return StaticHybridLayer(self.get_max_length(), self.number_of_states)

    KINDS[StaticHybridLayer] = PrunedStaticHybridLayer
