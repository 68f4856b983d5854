"""CriticalAdaKV (arXiv 2407.11550, 2502.03805), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, arguments, observed
from press_core.methods.critical_adakv import CriticalAdaKV


@dataclass
class CriticalAdaKVPress(CriticalAdaKV, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        if self.leaves_whole(call):
            return call.keys, call.values
        scores = self.press.score(*arguments(call, kwargs))
        return call.keep_heads(self.choose(call, scores))
