"""Presses that prune chunk by chunk, or keep whole chunks, by the scores of another press."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.budget import Tokens, kept_of_chunks, n_kept
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import above, count
from press_core.scoring import READS, BudgetPress, Wrapper
from press_core.select import best_first, top_positions
from press_core.traits import Needs, Phase


@dataclass
class Chunk(Wrapper):
    """Keeps what the wrapped press keeps of each chunk, scored and pruned separately.

    Within a chunk, the press sees the keys, values, queries and positions of that chunk only.

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress).
        chunk_length: tokens per chunk; the last one may be shorter.
    """

    chunk_length: int = count(1024, 1)

    def compress(self, call: AttentionCall) -> Eviction:
        step, amount = self.chunk_length, self.amount_of(call)
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
    """Keeps the chunks of neighbouring tokens with the highest mean score (arXiv 2502.00299).

    Scores of the wrapped press are summed over heads and averaged per chunk; every head keeps the
    same chunks, `max(1, int(n_chunks * (1 - compression_ratio)))` of `ceil(S / chunk_length)`.
    Contexts shorter than one chunk are pruned by the wrapped press. Paper: Liu et al.

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress); its ratio sets the budget.
        chunk_length: tokens per chunk; the last one may be shorter and counts as a chunk.
    """

    chunk_length: int = count(20, 1)

    row_by_row = True  # each row chooses its own chunks

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        is_short = call.length < self.chunk_length
        return self.press.evict(call) if is_short else self.alike(call, n)

    def alike(self, call: AttentionCall, n: int) -> Eviction:
        """Keep the same tokens in every head, by the sums of their scores."""
        per_token = self.scorer.checked_scores(call).sum(dim=(0, 1))
        positions = self.choose(call, per_token, n).sort().values
        return Eviction.keep(call, positions.expand(*call.keys.shape[:2], -1))

    def choose(self, call: AttentionCall, scores: Tensor, n: int) -> Tensor:
        """Positions of the tokens that every head keeps, int64, by `scores` `(S,)`: about `n`."""
        chunks, held = in_chunks(scores, self.chunk_length)
        amount = self.amount_of(call)
        n_best = n_kept(len(chunks), amount)
        if isinstance(amount, Tokens):  # in integers, as a chunk is more than a rounding error
            n_best = max(1, len(chunks) * amount.of(call.length) // call.length)
        best = (chunks.sum(dim=-1) / held.sum(dim=-1)).topk(n_best).indices
        tokens = torch.arange(held.numel(), device=held.device).view_as(held)
        return tokens[best][held[best]]


@dataclass
class EntropyGatedChunkKV(ChunkKV):
    """Keeps the best chunks, but of low-entropy ones only the best tokens (after 2502.00299).

    A chunk is gated if its mean score is at least the median and the normalized entropy of its
    token scores is below the median. Gated chunks keep `low_entropy_chunk_length` tokens; the freed
    budget goes to further chunks, the last of which may keep its best tokens only. Every head keeps
    the same tokens, exactly as many as the wrapped press would.

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress); its ratio sets the budget.
        chunk_length: tokens per chunk, above `low_entropy_chunk_length`; the last one may be
            shorter and counts as a chunk.
        low_entropy_chunk_length: number of best tokens that a gated chunk keeps.
    """

    chunk_length: int = above("low_entropy_chunk_length", 10)
    low_entropy_chunk_length: int = count(4, 1)

    spend = ChunkKV.alike  # a short context is one chunk

    def choose(self, call: AttentionCall, scores: Tensor, n: int) -> Tensor:
        return gated_order(scores, self.chunk_length, self.low_entropy_chunk_length)[:n]


@dataclass
class Block(Wrapper, BudgetPress):
    """Keeps the best `n` tokens block by block: the kept ones compete with each next block.

    This is the block-wise eviction of KeyDiff (Park et al., arXiv 2504.15364), for any scorer. If
    the scorer reads keys and values only, a chunked prefill is pruned after each chunk, so that the
    cache never holds more than the budget and one chunk.

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress); its ratio sets the budget.
        block_size: tokens per block.
    """

    block_size: int = count(128, 1)

    @property
    def phases(self) -> Phase:
        reads = self.press.all_needs & (READS | Needs.ROPE)
        return Phase.PREFILL if reads else Phase.IN_PREFILL

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        tokens = torch.arange(call.length, device=call.keys.device).expand(call.keys.shape[:3])
        kept = tokens[..., :n]
        for block in tokens[..., n:].split(self.block_size, dim=-1):
            candidates = torch.cat((kept, block), dim=-1)
            kept = candidates[..., -n:]
            if self.is_long_enough(candidates.shape[-1]):  # else too few to score: keep the latest
                scores = self.scorer.checked_scores(call.select(candidates).with_budget(n))
                kept = candidates.gather(-1, top_positions(scores, n))
        return Eviction.keep(call, kept)


def in_chunks(scores: Tensor, chunk_length: int) -> tuple[Tensor, Tensor]:
    """Scores `(S,)` as `(n, c)` padded with zeros, and a mask `(n, c)`, true for tokens."""
    chunks = pad(scores, (0, -len(scores) % chunk_length)).view(-1, chunk_length)
    tokens = torch.arange(chunks.numel(), device=scores.device)
    return chunks, (tokens < len(scores)).view_as(chunks)


def gated_order(scores: Tensor, chunk_length: int, low_entropy_chunk_length: int) -> Tensor:
    """Indices of all tokens, `(S,)` int64, in the order in which the budget is spent on them.

    Chunks by descending mean score, and the tokens of each by descending score; then the tokens
    that were gated out of their chunks, by descending score.

    Args:
        scores: `(S,)`.
    """
    length = len(scores)
    chunks, held = in_chunks(scores, chunk_length)
    means = chunks.sum(dim=-1) / held.sum(dim=-1)
    entropies = normalized_entropy(chunks, held)
    gated = (means >= means.median()) & (entropies < entropies.median())
    best = best_first(chunks.masked_fill(~held, float("-inf"))[None], low_entropy_chunk_length)[0]
    gated_out = (gated[:, None] & ~best).flatten()[:length]
    # Stable sorts, the least significant key first.
    by_score = scores.argsort(descending=True)
    ranks = means.argsort(descending=True).argsort().repeat_interleave(chunk_length)[:length]
    ranks = ranks.masked_fill(gated_out, len(chunks))
    return by_score[ranks[by_score].argsort(stable=True)]


def normalized_entropy(chunks: Tensor, held: Tensor) -> Tensor:
    """Entropy of each chunk's scores, normalized to a distribution, `(n,)`: 1 if all are equal.

    A chunk with negative scores is shifted so that its minimum is 0. If all are 0 then, and for a
    single token, the entropy is 0.

    Args:
        chunks: `(n, c)`.
        held: `(n, c)` bool, true for tokens, false for padding.
    """
    least = chunks.masked_fill(~held, float("inf")).amin(dim=-1, keepdim=True).clamp(max=0)
    raised = (chunks - least) * held
    shares = raised / raised.sum(dim=-1, keepdim=True).clamp(min=1e-12)
    counts = held.sum(dim=-1).clamp(min=2).to(shares.dtype)
    return -torch.xlogy(shares, shares).sum(dim=-1) / counts.log()
