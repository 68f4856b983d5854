"""Observed attention (H2O, arXiv 2306.14048), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.observed_attention import ObservedAttention, observed_attention_scores


@dataclass
class ObservedAttentionPress(ObservedAttention, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return observed_attention_scores(call)
