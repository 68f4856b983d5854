"""Key norm (arXiv 2406.11430), with hooks."""

from dataclasses import dataclass

from hooks_impl.scorer import ScorerPress
from press_core.methods.knorm import Knorm, knorm_scores


@dataclass
class KnormPress(Knorm, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return knorm_scores(keys)
