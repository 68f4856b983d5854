"""Non-causal attention (arXiv 2507.08143), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.non_causal_attn import (
    NonCausalAttn,
    non_causal_scores,
    queries_of_all_keys,
)


@dataclass
class NonCausalAttnPress(NonCausalAttn, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        queries = queries_of_all_keys(call)
        return non_causal_scores(queries, call.keys, call.values, self.chunk_size)
