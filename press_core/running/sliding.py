"""Caches made without a config, in models with sliding-window layers."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from press_core.forward import Forward
from press_core.scope import ScopeState


def let_slide(scope: ScopeState, forward: Forward) -> None:
    """Give a cache made without a config sliding-window layers, as one made for the model has.

    If no cache layer is a sliding one, the model makes all masks for the length of the first layer.
    """
    cache = forward.cache
    windows = {other.site.layer_idx: other.window for other in scope.bystanders if other.window}
    if not windows or not isinstance(cache, Cache) or cache.layers:
        return
    if getattr(cache, "layer_class_to_replicate", None) is not DynamicLayer:
        return
    for index in range(max(windows) + 1):
        window = windows.get(index)
        kind: Any = DynamicLayer if window is None else DynamicSlidingWindowLayer
        cache.layers.append(kind() if window is None else kind(window))
