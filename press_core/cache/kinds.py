"""Which layers of `transformers` can be pruned, and the layer that takes the place of each.

Kinds that are not here (static buffers, quantized states) register themselves, see
`press_core.running`.
"""

from __future__ import annotations

from typing import Any

from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from press_core.cache.pruned import PrunedLayer
from press_core.errors import UnsupportedCacheError


class PrunedHybridLayer(PrunedLayer):
    """A pruned layer that keeps the state of a linear attention beside its keys and values."""

    def drop_last(self, n: int) -> None:
        raise UnsupportedCacheError(
            "a pruned layer with a linear state cannot give back its latest tokens"
        )


HybridLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
"""The layer of models that attend and keep a linear state in one; transformers 5.2 has none."""

KINDS: dict[type, type[PrunedLayer]] = {DynamicLayer: PrunedLayer}
"""By type of a layer of `transformers`, what takes its place once it is pruned."""

OPEN_KINDS: list[type] = []
"""Types of `KINDS` whose subclasses are pruned in the same way."""

if HybridLayer is not None:
    KINDS[HybridLayer] = PrunedHybridLayer
    # The state of a layer is written only to a layer that is known to have one.
    cache_utils.LinearAttentionCacheLayerMixin.register(PrunedHybridLayer)


def kind_of(layer: Any) -> type[PrunedLayer] | None:
    """What takes the place of a layer of `transformers`; None: it cannot be pruned."""
    # Layers that quantize are of a class for each library.
    of_open = (KINDS[kind] for kind in OPEN_KINDS if isinstance(layer, kind))
    return KINDS.get(type(layer)) or next(of_open, None)


def as_pruned(layer: Any) -> PrunedLayer | None:
    """A layer in the words of pruned layers, if it is of a kind that can be pruned, or None."""
    if isinstance(layer, PrunedLayer):
        return layer
    kind = kind_of(layer)
    return None if kind is None else kind(layer)
