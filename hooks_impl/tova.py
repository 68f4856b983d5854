"""TOVA (arXiv 2401.06104), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.scorer import ScorerPress
from press_core.methods.tova import TOVA, tova_scores


@dataclass
class TOVAPress(TOVA, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return tova_scores(observed(kwargs))
