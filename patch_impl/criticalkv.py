"""CriticalKV (arXiv 2502.03805), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import Scorer
from press_core.call import AttentionCall
from press_core.methods.criticalkv import CriticalKV


@dataclass
class CriticalKVPress(CriticalKV, Scorer):
    def score(self, call: AttentionCall) -> Tensor:
        return self.rescore(call, self.press.score(call))
