"""DuoAttention (arXiv 2410.10819), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from patch_impl.collector import Collector
from press_core.call import AttentionCall
from press_core.methods.duo_attention import DuoAttention


@dataclass
class DuoAttentionPress(DuoAttention, BasePress):
    collector = Collector

    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return self.keep(call)
