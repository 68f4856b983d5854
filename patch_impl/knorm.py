"""Key norm (arXiv 2406.11430), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.knorm import Knorm, knorm_scores


@dataclass
class KnormPress(Knorm, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return knorm_scores(call.keys)
