"""PyramidKV (arXiv 2406.02069), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.scorer import ScorerPress
from press_core.methods.pyramidkv import PyramidKV
from press_core.methods.snapkv import snapkv_scores


@dataclass
class PyramidKVPress(PyramidKV, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return snapkv_scores(observed(kwargs), self.window_size, self.kernel_size)
