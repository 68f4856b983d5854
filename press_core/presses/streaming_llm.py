"""StreamingLLM (Xiao et al., arXiv 2309.17453): attention sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.press import RatioScorer, require


@dataclass
class StreamingLLM(RatioScorer):
    """Keeps the first `n_sink` tokens and the most recent ones (Xiao et al., arXiv 2309.17453).

    Contexts of at most `n_sink` tokens are left whole.

    Attributes:
        n_sink: tokens at the start that are always kept.
    """

    n_sink: int = 4

    reads_states = False
    alike_per_head = True

    def validate(self) -> None:
        super().validate()
        require(self, "n_sink", self.n_sink >= 0, "a number of tokens, 0 or more")

    def is_long_enough(self, length: int) -> bool:
        return length > self.n_sink

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return streaming_llm_scores(call.keys, self.budget(call), self.n_sink)


def streaming_llm_scores(keys: Tensor, budget: int, n_sink: int) -> Tensor:
    """1 for the sinks and for the recent tokens that the budget leaves room for, 0 between.

    Args:
        keys: `(B, H_kv, S, d)`.
        budget: how many tokens are to be kept.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    batch, n_kv, length, _ = keys.shape
    scores = torch.ones(length, device=keys.device)
    scores[n_sink : length - max(0, budget - n_sink)] = 0
    if budget < n_sink:  # room for some of the sinks only: the first ones
        scores[budget:] = 0
    return scores.expand(batch, n_kv, -1)
