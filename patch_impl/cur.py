"""CurDKV (arXiv 2509.15038), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.cur import CUR, cur_scores


@dataclass
class CURPress(CUR, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return cur_scores(call.keys, call.values, self, call.site.layer_idx)
