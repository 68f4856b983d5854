"""Observed attention, the score of H2O (Zhang et al., arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.attention import received_attention
from press_core.call import AttentionCall
from press_core.press import Needs, RatioScorer


@dataclass
class ObservedAttention(RatioScorer):
    """Keeps the tokens that were attended to most during prefill (H2O, arXiv 2306.14048).

    Where the attention implementation returns weights (eager), those are used; elsewhere they are
    computed from the exact queries and keys, some rows at a time, in O(S) extra memory.
    """

    needs = Needs.QUERIES

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return observed_attention_scores(call)


def observed_attention_scores(call: AttentionCall) -> Tensor:
    """Mean attention that each key received from the queries that can see it, mean over the group.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    length = call.length
    received = received_attention(call)
    n_queries = length if call.tokens is not None else call.hidden_states.shape[1]
    observers = torch.arange(length, 0, -1, device=call.keys.device).clamp(max=max(1, n_queries))
    return received / observers
