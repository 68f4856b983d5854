"""Kept keys at new positions, with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, arguments, observed
from press_core.methods.key_rerotation import KeyRerotation


@dataclass
class KeyRerotationPress(KeyRerotation, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        keys, values = self.press.compress(*arguments(call, kwargs))
        return call.turn(keys), values
