"""TOVA (Oren et al., arXiv 2401.06104): what the last token looks at."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from press_core.attention import mean_attention
from press_core.call import AttentionCall
from press_core.press import Needs, RatioScorer
from press_core.select import protect, trailing


@dataclass
class TOVA(RatioScorer):
    """Keeps what the last query attends to, over all heads (Oren et al., arXiv 2401.06104)."""

    needs = Needs.QUERIES

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return tova_scores(call)


def tova_scores(call: AttentionCall) -> Tensor:
    """Attention of the last query, mean over all heads, the same for every KV head.

    Returns:
        `(B, H_kv, S)`, float32; the last token is protected.
    """
    weights = mean_attention(call, call.queries(1)).mean(dim=1, keepdim=True)
    scores = weights.expand(-1, call.keys.shape[1], -1)
    return protect(scores, trailing(call.keys, 1))
