"""SnapKV (arXiv 2404.14469), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.scorer import ScorerPress
from press_core.methods.snapkv import SnapKV, snapkv_scores


@dataclass
class SnapKVPress(SnapKV, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return snapkv_scores(observed(kwargs), self.window_size, self.kernel_size)
