"""Quantized caches: a press sees exact keys, and the kept ones are quantized afterwards."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from press_core.cache.caches import KINDS
from press_core.cache.pruned import PrunedLayer
from press_core.errors import UnsupportedCacheError
from press_core.forward import Forward
from press_core.scope import ScopeState
from press_core.traits import Evicts, Phase

# Releases after transformers 5.2 reorder quantized states when they next dequantize them.
_REORDERS = hasattr(QuantizedLayer, "_apply_pending_reorder")


class PrunedQuantizedLayer(PrunedLayer):
    """A pruned layer that quantizes groups of states, and stores the latest ones exactly."""

    is_croppable = False
    stores = Evicts.TOKENS
    storage = "a quantized cache holds as many tokens for each head, and all channels of the keys"

    @property
    def n_slots(self) -> int:
        return int(self.inner.get_seq_length())

    @property
    def batch(self) -> int:
        return len(self.values) if self.values.numel() else len(self.states()[1])

    def states(self) -> tuple[Tensor, Tensor]:
        inner = self.inner
        keys, values = map(inner._dequantize, (inner._quantized_keys, inner._quantized_values))
        if _REORDERS:
            keys, values = inner._apply_pending_reorder(keys, values)
        if not inner.keys.numel():
            return keys, values
        return torch.cat((keys, inner.keys), dim=-2), torch.cat((values, inner.values), dim=-2)

    def holding(self, keys: Tensor, values: Tensor) -> PrunedLayer:
        layer = PrunedQuantizedLayer(self.emptied())
        layer.inner.update(keys, values)
        return layer

    def emptied(self) -> Any:
        empty = super().emptied()
        empty._quantized_keys = empty._quantized_values = None
        return empty

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            # transformers would select rows only of the tokens that are not quantized yet.
            raise UnsupportedCacheError(
                "rows of a quantized layer cannot be selected or repeated, nor its beams reordered "
                "by transformers 5.2; use a DynamicCache, or a newer transformers for beam search"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        select = super().batch_select_indices if _REORDERS else self.batch_select_indices
        select(beam_idx)


class StagingLayer(PrunedLayer):
    """Replaces an empty quantized layer during a prefill, so that a press sees exact keys.

    What a press keeps of them is quantized when it is stored.
    """

    stores, storage = PrunedQuantizedLayer.stores, PrunedQuantizedLayer.storage

    def __init__(self, quantized: QuantizedLayer) -> None:
        super().__init__(DynamicLayer())
        self.quantized = quantized

    def holding(self, keys: Tensor, values: Tensor) -> PrunedLayer:
        return PrunedQuantizedLayer(self.quantized).holding(keys, values)

    def settled(self) -> PrunedLayer:
        return self.holding(*self.states())


KINDS[QuantizedLayer] = PrunedQuantizedLayer


def stage(scope: ScopeState, forward: Forward) -> None:
    """Let the layers of an empty quantized cache hold exact states until they are pruned."""
    layers = getattr(forward.cache, "layers", [])
    if not forward.is_context or not scope.traits.phases & (Phase.IN_PREFILL | Phase.AFTER_DECODER):
        return
    for site in scope.sites:
        layer = layers[site.layer_idx] if site.layer_idx < len(layers) else None
        if not isinstance(layer, QuantizedLayer):
            continue
        PrunedQuantizedLayer(layer).check_stores(scope.press.evicts)
        if forward.n_remaining or scope.traits.phases & Phase.AFTER_DECODER:
            raise UnsupportedCacheError(
                "a quantized cache gives back no exact keys of earlier chunks or layers, which the "
                "press needs; prefill in one forward, or use a DynamicCache"
            )
        layers[site.layer_idx] = StagingLayer(layer)
        forward.at_failure.append(partial(layers.__setitem__, site.layer_idx, layer))
        forward.at_end.append(partial(_quantize, layers, site.layer_idx))


def _quantize(layers: Any, index: int) -> None:
    """Quantize what was not stored: a press's own hook may not have asked for any pruning."""
    layer = layers[index]
    if isinstance(layer, StagingLayer):  # a model may have run its first layers only
        layers[index] = layer.settled().inner if layer.is_initialized else layer.quantized
