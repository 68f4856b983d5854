"""Non-causal attention (arXiv 2507.08143), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.scorer import ScorerPress
from press_core.methods.non_causal_attn import (
    NonCausalAttn,
    non_causal_scores,
    queries_of_all_keys,
)


@dataclass
class NonCausalAttnPress(NonCausalAttn, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        queries = queries_of_all_keys(observed(kwargs))
        return non_causal_scores(queries, keys, values, self.chunk_size)
