"""Expected attention (arXiv 2510.00636) from statistics measured beforehand, with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.collector import Collector
from hooks_impl.scorer import ScorerPress
from press_core.methods.expected_attention_stats import (
    ExpectedAttentionWithStats,
    expected_attention_stats_scores,
)


@dataclass
class ExpectedAttentionStatsPress(ExpectedAttentionWithStats, ScorerPress):
    collector = Collector

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return expected_attention_stats_scores(observed(kwargs), self)
