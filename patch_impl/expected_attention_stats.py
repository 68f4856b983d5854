"""Expected attention (arXiv 2510.00636) from statistics measured beforehand, with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.collector import Collector
from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.expected_attention_stats import (
    ExpectedAttentionWithStats,
    expected_attention_stats_scores,
)


@dataclass
class ExpectedAttentionStatsPress(ExpectedAttentionWithStats, ScorerPress):
    collector = Collector

    def score(self, call: AttentionCall) -> Tensor:
        return expected_attention_stats_scores(call, self)
