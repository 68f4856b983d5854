"""One compression ratio per layer, with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.per_layer_compression import PerLayerCompression


@dataclass
class PerLayerCompressionPress(PerLayerCompression, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return self.at(call.site).compress(call)
