"""SimLayerKV (arXiv 2410.13846), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, observed
from press_core.methods.simlayerkv import SimLayerKV


@dataclass
class SimLayerKVPress(SimLayerKV, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        return self.keep(call)
