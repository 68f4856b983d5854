"""DMS at inference (arXiv 2506.05345), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, arguments, observed
from press_core.methods.dms import DMS


@dataclass
class DMSPress(DMS, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        if not self.acts_on(call.length):
            return call.keys, call.values
        scores = self.press.score(*arguments(call, kwargs))
        return self.judge(call, scores)
