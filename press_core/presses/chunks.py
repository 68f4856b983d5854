"""Presses that decide chunk by chunk or block by block, ChunkKV (arXiv 2502.00299) among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.budget import Tokens, kept_of_chunks
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import above, count
from press_core.scoring import BudgetPress, Wrapper
from press_core.select import best_first, top_positions, upcast
from press_core.traits import Needs, Phase


@dataclass
class Chunk(Wrapper):
    """Scores and prunes each chunk by itself, with the chunk's own queries and positions.

    Attributes:
        press: scores tokens.
        chunk_length: tokens per chunk; the last one may be shorter.
    """

    chunk_length: int = count(1024, 1)

    def compress(self, call: AttentionCall) -> Eviction:
        step, amount = self.chunk_length, self.amount
        starts = range(0, call.length, step)
        chunks = [call.chunk(start, start + step) for start in starts]
        if isinstance(amount, Tokens):
            numbers = kept_of_chunks(call.length, step, amount)
            chunks = [chunk.with_budget(n) for chunk, n in zip(chunks, numbers, strict=True)]
        evictions = [self.press.evict(chunk) for chunk in chunks]
        if all(eviction.is_whole for eviction in evictions):
            return Eviction.nothing(call)
        kept = [start + e.known_kept for start, e in zip(starts, evictions, strict=True)]
        return Eviction.keep(call, torch.cat(kept, dim=-1))


@dataclass
class ChunkKV(Wrapper, BudgetPress):
    """Keeps whole chunks of neighbouring tokens (Liu et al., arXiv 2502.00299).

    Of `ceil(S / chunk_length)` chunks it keeps the share that the wrapped press keeps of tokens, at
    least one; every head keeps the same. Contexts shorter than one chunk are the wrapped press's.

    Attributes:
        press: scores tokens.
        chunk_length: tokens per chunk; a shorter last one counts as one.
    """

    chunk_length: int = count(20, 1)

    row_by_row = True  # rows choose other chunks

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        if call.length < self.chunk_length:
            return self.press.evict(call)
        per_token = upcast(self.scorer.checked_scores(call)).sum(dim=(0, 1))
        positions = self.choose(call, per_token).sort().values
        return Eviction.keep(call, positions.expand(*call.keys.shape[:2], -1))

    def choose(self, call: AttentionCall, scores: Tensor) -> Tensor:
        """Positions of the tokens that every head keeps, `(n,)`, by `scores` `(S,)`."""
        chunks, held = in_chunks(scores, self.chunk_length)
        n = max(1, int(len(chunks) * (1 - self.ratio_of(call.length))))
        best = (chunks.sum(dim=-1) / held.sum(dim=-1)).topk(n).indices
        tokens = torch.arange(held.numel(), device=held.device).view_as(held)
        return tokens[best][held[best]]


@dataclass
class EntropyGatedChunkKV(ChunkKV):
    """Keeps the best chunks, and of those with few good tokens only these (after 2502.00299).

    A chunk that scores at least the median, and over whose tokens the score is spread less evenly
    than over those of the median chunk, gives all but its best tokens to further chunks. Every head
    keeps the same tokens, exactly as many as the wrapped press would.

    Attributes:
        press: scores tokens.
        chunk_length: tokens per chunk; a shorter last one counts as one.
        low_entropy_chunk_length: tokens that are left of such a chunk.
    """

    chunk_length: int = above("low_entropy_chunk_length", 10)
    low_entropy_chunk_length: int = count(4, 1)

    def choose(self, call: AttentionCall, scores: Tensor) -> Tensor:
        order = gated_order(scores, self.chunk_length, self.low_entropy_chunk_length)
        return order[: self.budget(call)]


@dataclass
class Block(Wrapper, BudgetPress):
    """Prunes block by block: what is kept so far and the next block compete for the budget.

    The block-wise eviction of KeyDiff (Park et al., arXiv 2504.15364), for any score. Where that
    takes keys and values alone, a prefill that comes in chunks is pruned after each: the cache
    holds no more than the budget and a chunk.

    Attributes:
        press: scores tokens.
        block_size: tokens that join the competition at a time.
    """

    block_size: int = count(128, 1)

    @property
    def phases(self) -> Phase:
        reads = Needs.QUERIES | Needs.ROPE | Needs.FORWARD | Needs.HIDDEN_STATES
        return Phase.PREFILL if self.press.needs & reads else Phase.IN_PREFILL

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        tokens = torch.arange(call.length, device=call.keys.device).expand(call.keys.shape[:3])
        kept = tokens[..., :n]
        for block in tokens[..., n:].split(self.block_size, dim=-1):
            kept = self.compete(call, torch.cat((kept, block), dim=-1), n)
        return Eviction.keep(call, kept)

    def compete(self, call: AttentionCall, candidates: Tensor, n: int) -> Tensor:
        """The best `n` of `candidates` `(B, H_kv, m)`; the last, where there are too few to judge.

        Returns:
            `(B, H_kv, n)` int64, ascending.
        """
        if not self.is_long_enough(candidates.shape[-1]):
            return candidates[..., -n:]
        scores = self.scorer.checked_scores(call.select(candidates).with_budget(n))
        return candidates.gather(-1, top_positions(scores, n))


def in_chunks(scores: Tensor, chunk_length: int) -> tuple[Tensor, Tensor]:
    """Scores `(S,)` as `(n, c)`, zeros behind the last one, and where there is a token."""
    chunks = pad(scores, (0, -len(scores) % chunk_length)).view(-1, chunk_length)
    tokens = torch.arange(chunks.numel(), device=scores.device)
    return chunks, (tokens < len(scores)).view_as(chunks)


def gated_order(scores: Tensor, chunk_length: int, low_entropy_chunk_length: int) -> Tensor:
    """All tokens `(S,)`, in the order in which they are kept.

    Chunk by chunk, the best first and within each its best tokens first; in the end what the gate
    has taken out of chunks.

    Args:
        scores: `(S,)`.
    """
    length = len(scores)
    chunks, held = in_chunks(scores, chunk_length)
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
