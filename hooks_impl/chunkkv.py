"""ChunkKV (arXiv 2502.00299), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, arguments, observed
from press_core.methods.chunkkv import ChunkKV


@dataclass
class ChunkKVPress(ChunkKV, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        if call.length < self.chunk_length:
            return self.press.compress(*arguments(call, kwargs))
        if self.leaves_whole(call):
            return call.keys, call.values
        return self.keep(call, self.press.score(*arguments(call, kwargs)))
