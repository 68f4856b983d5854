"""ThinK (arXiv 2407.21018), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, observed
from press_core.methods.think import ThinK


@dataclass
class ThinKPress(ThinK, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        return self.drop(call)
