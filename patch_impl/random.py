"""Random eviction, with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.random import Random, random_scores


@dataclass
class RandomPress(Random, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return random_scores(call.keys, self.seed, call.site.layer_idx)
