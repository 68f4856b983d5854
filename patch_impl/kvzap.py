"""KVzap (arXiv 2601.07891), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.collector import Collector
from patch_impl.kvzip import KVzipPress
from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.kvzap import KVzap, kvzap_scores


@dataclass
class KVzapPress(KVzap, ScorerPress):
    collector = Collector
    teacher = KVzipPress

    def score(self, call: AttentionCall) -> Tensor:
        return kvzap_scores(call, self.regressor)
