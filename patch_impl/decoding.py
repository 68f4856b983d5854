"""Pruning while decoding, with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.decoding import Decoding


@dataclass
class DecodingPress(Decoding, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        call.target = self.target_size
        return self.base_press.compress(call)
