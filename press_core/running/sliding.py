"""Caches made without a config, in models with sliding-window layers."""

from typing import Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from press_core.cache.caches import is_empty
from press_core.errors import UnsupportedCacheError
from press_core.forward import Forward
from press_core.scope import ScopeState
from press_core.traits import Evicts, Phase


def let_slide(scope: ScopeState, cache: Any) -> None:
    """Give an empty cache without a config the sliding-window layers that the model's own has."""
    is_plain = getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
    if not (is_plain and scope.sites[0].place.sizes_sliding):
        return
    layers = list(enumerate(cache.layers))
    if all(type(layer) is DynamicLayer and is_empty(cache, index) for index, layer in layers):
        cache.layers[:] = DynamicCache(config=getattr(scope.decoder, "config", None)).layers


def refuse_full(scope: ScopeState, forward: Forward) -> None:
    """Raise if a press would prune, while decoding, a cache that such layers are missing from."""
    decodes = scope.traits.phases & Phase.BEHIND_CONTEXTS
    if forward.is_context or not decodes or scope.press.evicts is Evicts.NOTHING:
        return
    cache = forward.cache
    if not (scope.sites[0].place.sizes_sliding and isinstance(cache, Cache)):
        return
    if any(type(x) is DynamicLayer for x in cache.layers) and not any(cache.is_sliding):
        raise UnsupportedCacheError(
            f"{type(scope.press).__name__} would prune a {type(cache).__name__} without "
            "sliding windows, which this model has; fill a DynamicCache(config=model.config)"
        )
