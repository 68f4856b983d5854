"""The layers of a `transformers` cache: which can be pruned, and what they hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedLayer,
)

from press_core.cache.pruned import HybridLayer, PrefillStagingLayer, PrunedLayer, states_of
from press_core.cache.ragged import RaggedLayer
from press_core.errors import UnsupportedCacheError


def prunable_layer(cache: Any, layer_idx: int) -> Any:
    """The layer of `cache` that a press may prune.

    Raises:
        UnsupportedCacheError: for anything but a growing layer of keys and values, plain or
            quantized group by group.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise UnsupportedCacheError(
            f"cannot prune a {type(cache).__name__}; pass a DynamicCache as past_key_values, or "
            "nothing and let the model make one"
        )
    layer = cache.layers[layer_idx]
    plain = type(layer) in (DynamicLayer, HybridLayer, PrefillStagingLayer)
    if not plain and not isinstance(layer, (PrunedLayer, RaggedLayer, QuantizedLayer)):
        raise UnsupportedCacheError(
            f"cannot prune layer {layer_idx} of a {type(cache).__name__}: it is a "
            f"{type(layer).__name__}, and only growing layers (DynamicCache, QuantizedCache) can "
            "give tokens up"
        )
    return layer


def mask_layer(cache: Cache) -> Any:
    """The layer whose length the model builds its one mask for: the first that does not slide."""
    return next(
        layer for layer in cache.layers if isinstance(layer, DynamicLayer) and not layer.is_sliding
    )


def model_clock(cache: Cache) -> int:
    """How many tokens the model takes `cache` to have seen: it counts positions from there."""
    return int(cache.get_seq_length())


def mask_columns(layer: Any) -> int:
    """Columns that the model's mask has for what `layer` holds."""
    return int(layer.n_slots if isinstance(layer, PrunedLayer) else layer.get_seq_length())


def check_prunable(cache: Any, layer_idx: int) -> None:
    """Refuse, before the layer is run, a cache that could not be pruned afterwards."""
    if isinstance(cache, Cache) and layer_idx >= len(cache.layers):
        replicate = getattr(cache, "layer_class_to_replicate", None)
        if replicate is DynamicLayer:
            return  # created as it is needed
        raise UnsupportedCacheError(
            f"cannot prune a {type(cache).__name__} of {getattr(replicate, '__name__', 'no')} "
            "layers; pass a DynamicCache"
        )
    prunable_layer(cache, layer_idx)


def let_slide(cache: Cache, layer_idx: int, window: int) -> None:
    """Let a bare cache keep a window of a layer that slides, as one made for the model does.

    The model builds the masks of all layers for the first where no layer says that it slides.
    """
    grows = getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
    if grows and layer_idx == len(cache.layers):
        cache.layers.append(DynamicSlidingWindowLayer(window))


def refuse_offloading(press: Any, cache: Any) -> None:
    """Refuse a cache that moves its layers away beneath the attention that reads them in place.

    Raises:
        UnsupportedCacheError: naming the press.
    """
    if getattr(cache, "offloading", False):
        raise UnsupportedCacheError(
            f"{type(press).__name__} leaves a cache that attention reads where it lies; use a "
            "DynamicCache without offloading"
        )


def row_alone(cache: Cache, row: int, slots: Tensor | None) -> Cache:
    """A cache that holds one row of `cache`, which stays as it is.

    Args:
        slots: `(n,)` int64, those of the row that are no padding; None: all.

    Raises:
        UnsupportedCacheError: if some layers keep a window only, and there is padding.
    """
    alone = DynamicCache()
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            copied = DynamicLayer()
            copied.lazy_initialization(layer.keys, layer.values)
            states = (layer.keys[row : row + 1], layer.values[row : row + 1])
            copied.keys, copied.values = (
                x if slots is None else x.index_select(2, slots) for x in states
            )
        elif slots is not None:
            raise UnsupportedCacheError(
                f"rows of a padded batch cannot be told apart in a {type(layer).__name__}; run "
                "them one by one"
            )
        else:
            copied = copy.deepcopy(layer)
            copied.batch_select_indices(torch.tensor([row]))
        alone.layers.append(copied)
    return alone


def kept_lengths(cache: Cache) -> list[Tensor]:
    """How many positions each head physically keeps.

    Returns:
        Per layer an int64 tensor `(B, H_kv)`; empty slots of padded rows do not count. A layer that
        has seen nothing yet gives a tensor of shape `(0, 0)`, and so does one that holds no keys
        (of a linear attention, or of another layer). Of an encoder-decoder: the decoder's own.
    """
    return [_kept(layer) for layer in getattr(cache, "self_attention_cache", cache).layers]


def _kept(layer: Any) -> Tensor:
    if not hasattr(layer, "get_seq_length") or layer.get_seq_length() == 0:
        return torch.zeros(0, 0, dtype=torch.int64)
    if isinstance(layer, RaggedLayer):
        return layer.lengths
    keys, _ = states_of(layer)
    n_slots = layer.n_slots if isinstance(layer, PrunedLayer) else keys.shape[2]
    kept = torch.full(keys.shape[:2], n_slots, dtype=torch.int64, device=keys.device)
    if isinstance(layer, PrunedLayer) and layer.positions is not None:
        kept -= (layer.positions < 0).sum(dim=-1).to(kept.device)
    return kept


def cache_nbytes(cache: Cache) -> int:
    """Bytes of key and value storage that `cache` holds, spare capacity included."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for part in _parts(cache)
        for layer in part.layers
        for name in ("keys", "values", "recent_keys", "recent_values")
        for states in _plain_tensors(layer, name)
        if (storage := states.untyped_storage()).nbytes()
    }
    return sum(storages.values())


def _parts(cache: Any) -> list[Any]:
    """`cache`, or both caches of an encoder-decoder."""
    own = getattr(cache, "self_attention_cache", None)
    return [cache] if own is None else [own, cache.cross_attention_cache]


def _plain_tensors(layer: Any, name: str) -> Iterator[Tensor]:
    """The tensors that store the keys or the values of `layer`, scales of quantized ones too."""
    for states in (getattr(layer, name, None), getattr(layer, f"_quantized_{name}", None)):
        yield from _flattened(states)


def _flattened(states: Any) -> Iterator[Tensor]:
    if isinstance(states, dict):  # what hqq keeps beside its codes
        states = tuple(states.values())
    if isinstance(states, tuple):
        for part in states:
            yield from _flattened(part)
    elif isinstance(states, Tensor) and hasattr(states, "__tensor_flatten__"):  # quanto
        for part in states.__tensor_flatten__()[0]:
            yield from _flattened(getattr(states, part))
    elif isinstance(states, Tensor):
        yield states
