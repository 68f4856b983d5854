"""Compactor (arXiv 2507.08143), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.compactor import Compactor, compactor_scores


@dataclass
class CompactorPress(Compactor, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return compactor_scores(call, self)
