"""One compression ratio per layer, with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, arguments, observed
from press_core.methods.per_layer_compression import PerLayerCompression


@dataclass
class PerLayerCompressionPress(PerLayerCompression, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        return self.at(call.site).compress(*arguments(call, kwargs))
