"""Leverage scores (arXiv 2507.08143), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.leverage_score import LeverageScore, leverage_scores


@dataclass
class LeverageScorePress(LeverageScore, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        keys = call.keys_before_rope()
        return leverage_scores(keys, self.sketch_dimension, call.site.layer_idx)
