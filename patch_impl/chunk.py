"""Each chunk pruned by itself, with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.chunk import Chunk


@dataclass
class ChunkPress(Chunk, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        chunks = self.chunks(call)
        for chunk in chunks:
            self.press.compress(chunk)
        return self.keep(call, chunks)
