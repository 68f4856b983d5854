"""Leverage scores (arXiv 2507.08143), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.scorer import ScorerPress
from press_core.methods.leverage_score import LeverageScore, leverage_scores


@dataclass
class LeverageScorePress(LeverageScore, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        keys = observed(kwargs).keys_before_rope()
        return leverage_scores(keys, self.sketch_dimension, module.layer_idx)
