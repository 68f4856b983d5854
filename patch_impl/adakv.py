"""AdaKV (arXiv 2407.11550), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.adakv import AdaKV


@dataclass
class AdaKVPress(AdaKV, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        if self.leaves_whole(call):
            return call.keys, call.values
        scores = self.press.score(call)
        return call.keep_heads(self.choose(call, scores))
