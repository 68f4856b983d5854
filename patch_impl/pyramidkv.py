"""PyramidKV (arXiv 2406.02069), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.pyramidkv import PyramidKV
from press_core.methods.snapkv import snapkv_scores


@dataclass
class PyramidKVPress(PyramidKV, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return snapkv_scores(call, self.window_size, self.kernel_size)
