"""Caches made without a config, in models with sliding-window layers."""

from typing import Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from press_core.scope import ScopeState


def let_slide(scope: ScopeState, cache: Any) -> None:
    """Give a new cache without a config the sliding-window layers that one made for the model has.

    If no cache layer is a sliding one, the model makes all masks for the length of the first layer.
    """
    slides = any(other.place.owner is None for other in scope.bystanders)
    if not slides or not isinstance(cache, Cache) or cache.layers:
        return
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layers.extend(DynamicCache(config=getattr(scope.decoder, "config", None)).layers)
