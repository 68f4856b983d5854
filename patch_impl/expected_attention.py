"""Expected attention (arXiv 2510.00636), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.expected_attention import (
    ExpectedAttention,
    expected_attention_scores,
    query_statistics,
)


@dataclass
class ExpectedAttentionPress(ExpectedAttention, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return expected_attention_scores(call, *query_statistics(call, self.n_sink), self)
