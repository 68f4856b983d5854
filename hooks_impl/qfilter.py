"""Q-Filters (arXiv 2503.02812), with hooks."""

from dataclasses import dataclass

from hooks_impl.collector import Collector
from hooks_impl.scorer import ScorerPress
from press_core.methods.qfilter import QFilter, qfilter_scores


@dataclass
class QFilterPress(QFilter, ScorerPress):
    collector = Collector

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return qfilter_scores(keys, self.filters, module.layer_idx)
