"""Q-Filters (arXiv 2503.02812), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.collector import Collector
from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.qfilter import QFilter, qfilter_scores


@dataclass
class QFilterPress(QFilter, ScorerPress):
    collector = Collector

    def score(self, call: AttentionCall) -> Tensor:
        return qfilter_scores(call.keys, self.filters, call.site.layer_idx)
