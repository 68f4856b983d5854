"""Non-causal attention, one half of Compactor (Chari and Van Durme, arXiv 2507.08143)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from press_core.call import AttentionCall
from press_core.press import Needs, RatioScorer, require
from press_core.presses.leverage_score import standardised
from press_core.select import upcast


@dataclass
class NonCausalAttn(RatioScorer):
    """Keeps what is attended to from both sides within its chunk (arXiv 2507.08143).

    Attributes:
        chunk_size: tokens that attend to each other; a shorter last chunk is one by itself.
    """

    chunk_size: int = 256

    needs = Needs.QUERIES

    def validate(self) -> None:
        super().validate()
        require(self, "chunk_size", self.chunk_size >= 1, "a number of tokens, 1 or more")

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return non_causal_scores(queries_of_all_keys(call), call.keys, call.values, self.chunk_size)


_ROWS = 1024
"""Queries (of one KV head) whose weights are held at a time."""


def non_causal_scores(queries: Tensor, keys: Tensor, values: Tensor, chunk_size: int) -> Tensor:
    """Attention that each key receives in its chunk, without mask or scaling, times `‖v‖`.

    The mean over the group is pooled over three neighbours and standardised.

    Args:
        queries: `(B, H, S, d)`, after RoPE, as the keys are.
        keys, values: `(B, H_kv, S, d)`.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    batch, n_kv, length, d = keys.shape
    received = torch.zeros_like(upcast(keys[..., 0]))
    for start in range(0, length, chunk_size):
        chunk = slice(start, start + chunk_size)
        chunk_keys = upcast(keys[:, :, chunk])
        grouped = upcast(queries[:, :, chunk]).reshape(batch, n_kv, -1, d)
        for rows in grouped.split(_ROWS, dim=2):
            received[:, :, chunk] += (rows @ chunk_keys.mT).softmax(dim=-1).sum(dim=2)
    attention = received / (queries.shape[1] // n_kv)
    weighted = attention * upcast(values).norm(dim=-1)
    return standardised(avg_pool1d(weighted, kernel_size=3, stride=1, padding=1))


def queries_of_all_keys(call: AttentionCall) -> Tensor:
    """A query after RoPE for each key, `(B, H, S, d)`.

    Its own, or, for keys older than the `q` queries that are known (while decoding), those in turn.
    """
    queries = call.queries()
    n_known = queries.shape[2]
    if n_known == call.length:
        return queries
    turn = torch.arange(n_known - call.length, n_known, device=queries.device) % n_known
    return queries[:, :, turn]
