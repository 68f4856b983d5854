"""Bare caches of models whose layers slide: they keep a window, as caches made for the model do."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from press_core.forward import Forward
from press_core.scope import ScopeState


def let_slide(scope: ScopeState, forward: Forward) -> None:
    """Let a bare cache keep a window of layers that slide.

    The model makes the masks of all layers for the first where no layer says that it slides.
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
