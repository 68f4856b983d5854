"""Which cache layers of `transformers` can be pruned, and the class that replaces each.

Static and quantized layers are registered by `press_core.running`.
"""

from typing import Any

from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from press_core.cache.pruned import PrunedLayer
from press_core.errors import UnsupportedCacheError


class PrunedHybridLayer(PrunedLayer):
    """A pruned layer that also stores the state of a linear attention."""

    def drop_last(self, n: int) -> None:
        raise UnsupportedCacheError(
            "a pruned layer with a linear-attention state cannot remove its latest tokens"
        )


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
