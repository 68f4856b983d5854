"""Pruning while decoding, with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, arguments, observed
from press_core.methods.decoding import Decoding


@dataclass
class DecodingPress(Decoding, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        call.target = self.target_size
        return self.base_press.compress(*arguments(call, kwargs))
