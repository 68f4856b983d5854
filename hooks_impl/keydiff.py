"""KeyDiff (arXiv 2504.15364), with hooks."""

from dataclasses import dataclass

from hooks_impl.scorer import ScorerPress
from press_core.methods.keydiff import KeyDiff, keydiff_scores


@dataclass
class KeyDiffPress(KeyDiff, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keydiff_scores(keys)
