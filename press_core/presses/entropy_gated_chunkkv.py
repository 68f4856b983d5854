"""ChunkKV (arXiv 2502.00299) with a gate: chunks of one good token are not kept whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.eviction import Eviction
from press_core.press import require
from press_core.select import best_first, upcast


@dataclass
class EntropyGatedChunkKV(Wrapper):
    """Keeps the best chunks, and of those with few good tokens only these (after 2502.00299).

    A chunk that scores at least the median, and over whose tokens the score is spread less evenly
    than over those of the median chunk, gives all but its best tokens to further chunks. Every head
    keeps the same tokens, exactly as many as the wrapped press would.

    Attributes:
        press: scores tokens.
        chunk_length: tokens per chunk; a shorter last one counts as one.
        low_entropy_chunk_length: tokens that are left of such a chunk.
    """

    chunk_length: int = 10
    low_entropy_chunk_length: int = 4

    row_by_row = True  # rows choose other chunks

    def validate(self) -> None:
        super().validate()
        fits = 1 <= self.low_entropy_chunk_length < self.chunk_length
        allowed = f"1 or more, and less than chunk_length={self.chunk_length}"
        require(self, "low_entropy_chunk_length", fits, allowed)

    def decide(self, call: AttentionCall) -> Eviction:
        if call.length < self.chunk_length:
            return self.press.evict(call)
        if self.leaves_whole(call):
            return Eviction.nothing(call)
        per_token = upcast(self.scorer.token_scores(call)).sum(dim=(0, 1))
        order = gated_order(per_token, self.chunk_length, self.low_entropy_chunk_length)
        positions = order[: self.budget(call)].sort().values
        return Eviction.keep(call, positions.expand(*call.keys.shape[:2], -1))


def gated_order(scores: Tensor, chunk_length: int, low_entropy_chunk_length: int) -> Tensor:
    """All tokens `(S,)`, in the order in which they are kept.

    Chunk by chunk, the best first and within each its best tokens first; in the end what the gate
    has taken out of chunks.

    Args:
        scores: `(S,)`.
    """
    length = len(scores)
    chunks = pad(scores, (0, -length % chunk_length)).view(-1, chunk_length)
    held = torch.arange(chunks.numel(), device=scores.device).view_as(chunks) < length
    means = chunks.sum(dim=-1) / held.sum(dim=-1)
    entropies = normalized_entropy(chunks, held)
    gated = (means >= means.median()) & (entropies < entropies.median())
    best = best_first(chunks.masked_fill(~held, float("-inf"))[None], low_entropy_chunk_length)[0]
    late = (gated[:, None] & ~best).flatten()[:length]
    # Sorted by one thing after the other, the last of which counts most.
    by_score = scores.argsort(descending=True)
    places = means.argsort(descending=True).argsort().repeat_interleave(chunk_length)[:length]
    places = places.masked_fill(late, len(chunks))
    return by_score[places[by_score].argsort(stable=True)]


def normalized_entropy(chunks: Tensor, held: Tensor) -> Tensor:
    """Entropy of each chunk's scores as shares of their sum, `(n,)`: 1 where all are equal.

    Scores below zero are raised by the least of their chunk. A chunk of a single token has none.

    Args:
        chunks: `(n, c)`.
        held: `(n, c)` bool, where there is a token.
    """
    least = chunks.masked_fill(~held, float("inf")).amin(dim=-1, keepdim=True).clamp(max=0)
    raised = (chunks - least) * held
    shares = raised / raised.sum(dim=-1, keepdim=True).clamp(min=1e-12)
    counts = held.sum(dim=-1).clamp(min=2)
    return -torch.xlogy(shares, shares).sum(dim=-1) / counts.log()
