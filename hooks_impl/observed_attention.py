"""Observed attention (H2O, arXiv 2306.14048), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.scorer import ScorerPress
from press_core.methods.observed_attention import ObservedAttention, observed_attention_scores


@dataclass
class ObservedAttentionPress(ObservedAttention, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return observed_attention_scores(observed(kwargs))
