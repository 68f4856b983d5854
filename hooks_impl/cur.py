"""CurDKV (arXiv 2509.15038), with hooks."""

from dataclasses import dataclass

from hooks_impl.scorer import ScorerPress
from press_core.methods.cur import CUR, cur_scores


@dataclass
class CURPress(CUR, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return cur_scores(keys, values, self, module.layer_idx)
