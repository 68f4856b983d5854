"""KVzap (arXiv 2601.07891), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.collector import Collector
from hooks_impl.kvzip import KVzipPress
from hooks_impl.scorer import ScorerPress
from press_core.methods.kvzap import KVzap, kvzap_scores


@dataclass
class KVzapPress(KVzap, ScorerPress):
    collector = Collector
    teacher = KVzipPress

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return kvzap_scores(observed(kwargs), self.regressor)
