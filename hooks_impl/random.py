"""Random eviction, with hooks."""

from dataclasses import dataclass

from hooks_impl.scorer import ScorerPress
from press_core.methods.random import Random, random_scores


@dataclass
class RandomPress(Random, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return random_scores(keys, self.seed, module.layer_idx)
