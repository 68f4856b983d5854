"""Caches made without a config, in models with sliding-window layers."""

from typing import Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from press_core.cache.caches import is_empty
from press_core.errors import UnsupportedCacheError
from press_core.forward import Forward
from press_core.scope import ScopeState
from press_core.traits import Evicts, Phase


def let_slide(scope: ScopeState, cache: Any) -> None:
    """Give an empty cache without a config the sliding-window layers that the model's own has.

    If no cache layer is a sliding one, the model makes all masks for the length of the first layer.
    """
    if not _sliding(scope) or getattr(cache, "layer_class_to_replicate", None) is not DynamicLayer:
        return
    layers = list(enumerate(cache.layers))
    if all(type(layer) is DynamicLayer and is_empty(cache, index) for index, layer in layers):
        cache.layers[:] = DynamicCache(config=getattr(scope.decoder, "config", None)).layers


def refuse_full(scope: ScopeState, forward: Forward) -> None:
    """Raise if a press would prune, while decoding, a cache that such layers are missing from."""
    decodes = scope.traits.phases & Phase.BEHIND_CONTEXTS
    if forward.is_context or not decodes or scope.press.evicts is Evicts.NOTHING:
        return
    layers = forward.cache.layers if isinstance(forward.cache, Cache) else []
    found = [layers[index] for index in _sliding(scope) if index < len(layers)]
    if any(type(layer) is DynamicLayer for layer in found):
        raise UnsupportedCacheError(
            f"{type(scope.press).__name__} would prune a {type(forward.cache).__name__} without "
            "sliding windows, which this model has; fill a DynamicCache(config=model.config)"
        )


def _sliding(scope: ScopeState) -> list[int]:
    """Indices of the cache layers that have a sliding window in a cache made for the model."""
    return [other.layer_idx for other in scope.bystanders if other.place.owner is None]
