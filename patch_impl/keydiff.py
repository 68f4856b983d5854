"""KeyDiff (arXiv 2504.15364), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.keydiff import KeyDiff, keydiff_scores


@dataclass
class KeyDiffPress(KeyDiff, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return keydiff_scores(call.keys)
