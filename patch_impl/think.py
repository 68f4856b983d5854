"""ThinK (arXiv 2407.21018), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.think import ThinK


@dataclass
class ThinKPress(ThinK, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return self.drop(call)
