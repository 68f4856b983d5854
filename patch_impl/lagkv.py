"""LagKV (arXiv 2504.04704), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.lagkv import LagKV, lagkv_scores


@dataclass
class LagKVPress(LagKV, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return lagkv_scores(call.keys, call.values, self)
