"""Compactor (arXiv 2507.08143), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.scorer import ScorerPress
from press_core.methods.compactor import Compactor, compactor_scores


@dataclass
class CompactorPress(Compactor, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return compactor_scores(observed(kwargs), self)
