"""ChunkKV (arXiv 2502.00299), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.chunkkv import ChunkKV


@dataclass
class ChunkKVPress(ChunkKV, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        if call.length < self.chunk_length:
            return self.press.compress(call)
        if self.leaves_whole(call):
            return call.keys, call.values
        return self.keep(call, self.press.score(call))
