"""Each chunk pruned by itself, with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, arguments, observed
from press_core.methods.chunk import Chunk


@dataclass
class ChunkPress(Chunk, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        chunks = self.chunks(call)
        for chunk in chunks:
            self.press.compress(*arguments(chunk, kwargs))
        return self.keep(call, chunks)
