"""SimLayerKV (arXiv 2410.13846), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.simlayerkv import SimLayerKV


@dataclass
class SimLayerKVPress(SimLayerKV, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return self.keep(call)
