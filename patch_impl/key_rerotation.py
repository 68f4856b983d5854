"""Kept keys at new positions, with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.key_rerotation import KeyRerotation


@dataclass
class KeyRerotationPress(KeyRerotation, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        keys, values = self.press.compress(call)
        return call.turn(keys), values
