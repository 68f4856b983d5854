"""LagKV (arXiv 2504.04704), with hooks."""

from dataclasses import dataclass

from hooks_impl.scorer import ScorerPress
from press_core.methods.lagkv import LagKV, lagkv_scores


@dataclass
class LagKVPress(LagKV, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return lagkv_scores(keys, values, self)
