"""The layers of a `transformers` cache: which of them can be pruned, and what they store.

Static and quantized layers are registered in `KINDS` by `press_core.running`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, QuantizedLayer

from press_core.cache.pruned import PrunedLayer
from press_core.cache.tokens import ReadingNeeds
from press_core.errors import UnsupportedCacheError
from press_core.forward import own_cache


class PrunedHybridLayer(PrunedLayer):
    """A pruned layer that also stores the state of a linear attention."""

    is_croppable = False


HybridLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
"""Layer with keys, values and a linear-attention state; transformers 5.2 does not have it."""

KINDS: dict[type, type[PrunedLayer]] = {DynamicLayer: PrunedLayer}
"""By type of a `transformers` layer, the class that replaces it when it is pruned."""

if HybridLayer is not None:
    KINDS[HybridLayer] = PrunedHybridLayer
    # transformers updates the linear state only of layers that are instances of this mixin.
    cache_utils.LinearAttentionCacheLayerMixin.register(PrunedHybridLayer)


def kind_of(layer: Any) -> type[PrunedLayer] | None:
    """The class that replaces a layer of `transformers`; None: it cannot be pruned."""
    # Quantized layers have one subclass per library.
    return KINDS.get(QuantizedLayer if isinstance(layer, QuantizedLayer) else type(layer))


def as_pruned(layer: Any) -> PrunedLayer | None:
    """`layer` as a `PrunedLayer`, wrapped if necessary; None: it cannot be pruned."""
    if isinstance(layer, PrunedLayer):
        return layer
    kind = kind_of(layer)
    return None if kind is None else kind(layer)


def known(cache: Any, layer_idx: int) -> PrunedLayer:
    """A layer of `cache` as a `PrunedLayer`, whether or not anything was evicted from it.

    Raises:
        UnsupportedCacheError: if presses cannot prune this kind of cache or layer.
    """
    stored = _layers(cache)[layer_idx]
    layer = as_pruned(stored)
    if layer is None:
        raise UnsupportedCacheError(
            f"cannot prune layer {layer_idx} of a {type(cache).__name__}: it is a "
            f"{type(stored).__name__}, and only layers that store all tokens (DynamicCache, "
            "StaticCache, QuantizedCache of quanto or hqq) can be pruned"
        )
    return layer


def _layers(cache: Any) -> list[Any]:
    """The layers of `cache`, for an encoder-decoder those of the decoder's self-attention."""
    own = own_cache(cache)
    if not isinstance(own, Cache):
        raise UnsupportedCacheError(
            f"a {type(cache).__name__} is no cache with layers; pass a DynamicCache, such as a "
            "model makes where no past_key_values are passed"
        )
    return own.layers


def check_prunable(cache: Any, layer_idx: int) -> None:
    """Raise, before the layer runs, if its cache cannot be pruned afterwards.

    Raises:
        UnsupportedCacheError: if so.
    """
    layers = _layers(cache)
    if layer_idx < len(layers):
        known(cache, layer_idx)
    elif getattr(cache, "layer_class_to_replicate", None) is not DynamicLayer:  # added on demand
        raise UnsupportedCacheError(
            f"cannot prune layer {layer_idx} of a {type(cache).__name__} of {len(layers)} "
            "layers, which adds none that can be pruned; pass a DynamicCache"
        )


def is_empty(cache: Any, layer_idx: int) -> bool:
    """Whether a layer of `cache` has seen no token yet, or does not exist yet."""
    layers = getattr(cache, "layers", None)
    if layers is None or layer_idx >= len(layers):
        return layers is not None or cache is None
    return not _has_tokens(layers[layer_idx])


def _has_tokens(layer: Any) -> bool:
    if not getattr(layer, "is_initialized", False) or not hasattr(layer, "get_seq_length"):
        return False
    # The length of a static layer is a tensor, whose value is not known while compiling.
    return torch.compiler.is_compiling() or int(layer.get_seq_length()) > 0


def may_be_empty(cache: Any, layer_idx: int) -> bool:
    """Whether nothing was evicted from a layer of `cache`, and its length is in a tensor."""
    layers = getattr(cache, "layers", None)
    layer: Any = None if layers is None else layers[layer_idx]
    return kind_of(layer) is not None and isinstance(layer.get_seq_length(), Tensor)


def put_back_reset(cache: Any) -> None:
    """Replace pruned layers that were reset by the layers in them, which are as new."""
    layers = getattr(cache, "layers", [])
    for index, layer in enumerate(layers):
        if isinstance(layer, PrunedLayer) and not layer.is_initialized and "inner" in vars(layer):
            layers[index] = layer.inner


def mask_layer(cache: Cache) -> Any:
    """The layer for whose length the model builds its one mask: the first that does not slide."""
    return next(filter(sizes_masks, cache.layers))


def sizes_masks(layer: Any) -> bool:
    """Whether a model may build its one mask for the length of `layer`."""
    return hasattr(layer, "get_mask_sizes") and not getattr(layer, "is_sliding", False)


def pruned_layers(cache: Any) -> list[PrunedLayer]:
    """The layers of a cache from which something was evicted."""
    layers = getattr(cache, "layers", ())
    return [layer for layer in layers if isinstance(layer, PrunedLayer) and layer.kept.n_seen]


def are_special(layers: list[PrunedLayer]) -> bool:
    """Whether any of the pruned `layers` can need its own mask, positions or attention function."""
    plain = ReadingNeeds.NOTHING
    return any([x.needs is not plain or x.kept.following is not None for x in layers])


# ---- contents of a cache -------------------------------------------------------------------------


def kept_lengths(cache: Cache) -> list[Tensor]:
    """The physical length of each head: how many positions it stores.

    Returns:
        Per layer an int64 tensor `(B, H_kv)`; empty slots of padded rows do not count. Layers that
        have seen no token, and layers without keys (linear attention, or keys shared with another
        layer), give shape `(0, 0)`. For an encoder-decoder: the decoder's self-attention.
    """
    return [_lengths(layer) for layer in _layers(cache)]


def kept_positions(cache: Cache) -> list[Tensor]:
    """The sequence positions that each head stores.

    Returns:
        Per layer an int64 tensor `(B or 1, H_kv or 1, n)`, ascending along the last dimension; a
        head with fewer than `n` tokens is padded on the left with -1. The first two dimensions can
        be 1 where all rows or all heads store the same. Layers without keys: `(1, 1, 0)`.

    Raises:
        UnsupportedCacheError: if it is no cache, or a press did not say which tokens it kept.
    """
    return [_positions(layer, index) for index, layer in enumerate(_layers(cache))]


def _lengths(layer: Any) -> Tensor:
    if not _has_tokens(layer):
        return torch.zeros(0, 0, dtype=torch.int64)
    pruned = as_pruned(layer)
    if pruned is not None:
        return pruned.lengths()
    keys = _keys_of(layer)
    n = min(keys.shape[2], int(layer.get_seq_length()))
    return torch.full(keys.shape[:2], n, device=keys.device)


def _keys_of(layer: Any) -> Tensor:
    """The stored keys `(B, H_kv, S, d)` of a layer that no press can prune."""
    return layer.keys if layer.keys.dim() == 4 else layer._quantized_keys[0]


def _positions(layer: Any, index: int) -> Tensor:
    if not _has_tokens(layer):
        return torch.zeros(1, 1, 0, dtype=torch.int64)
    pruned = as_pruned(layer)
    if pruned is not None:
        found = pruned.all_positions()
        if found is None:
            raise UnsupportedCacheError(
                f"the press that pruned layer {index} did not say which tokens it kept; let its "
                "compress return Eviction.keep(call, positions)"
            )
        return found
    seen = int(layer.get_seq_length())
    first = seen - min(_keys_of(layer).shape[2], seen)
    return torch.arange(first, seen, device=layer.keys.device).view(1, 1, -1)


def cache_nbytes(cache: Cache) -> int:
    """Bytes of key and value storage of `cache`, spare capacity included."""
    own = own_cache(cache)
    storages = {
        storage.data_ptr(): storage.nbytes()
        for part in ([cache] if own is cache else [own, cache.cross_attention_cache])
        for layer in _layers(part)
        for states in _stored(layer)
        if (storage := states.untyped_storage()).nbytes()
    }
    return sum(storages.values())


def _stored(layer: Any) -> Iterator[Tensor]:
    """The tensors that store keys and values of `layer`, including scales of quantized states."""
    for name in ("keys", "values", "recent_keys", "_quantized_keys", "_quantized_values"):
        yield from flattened(getattr(layer, name, None))
    if hasattr(layer, "recent"):
        yield from _stored(layer.recent)


def flattened(states: Any) -> Iterator[Tensor]:
    """The plain tensors in nested `states`: those of quantized tensors, and shards of DTensors."""
    for part in tree_leaves(states):
        if hasattr(part, "__tensor_flatten__"):
            names, _ = part.__tensor_flatten__()
            yield from flattened([getattr(part, name) for name in names])
        elif isinstance(part, Tensor):
            yield part
