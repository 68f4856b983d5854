"""TOVA (arXiv 2401.06104), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.tova import TOVA, tova_scores


@dataclass
class TOVAPress(TOVA, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return tova_scores(call)
