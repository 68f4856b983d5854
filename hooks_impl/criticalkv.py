"""CriticalKV (arXiv 2502.03805), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import arguments, observed
from hooks_impl.scorer import Scorer
from press_core.methods.criticalkv import CriticalKV


@dataclass
class CriticalKVPress(CriticalKV, Scorer):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        return self.rescore(call, self.press.score(*arguments(call, kwargs)))
