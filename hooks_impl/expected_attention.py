"""Expected attention (arXiv 2510.00636), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.scorer import ScorerPress
from press_core.methods.expected_attention import (
    ExpectedAttention,
    expected_attention_scores,
    query_statistics,
)


@dataclass
class ExpectedAttentionPress(ExpectedAttention, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        return expected_attention_scores(call, *query_statistics(call, self.n_sink), self)
