"""Presses around presses: one after the other, a ratio for each layer, new positions, by chunks.

ChunkKV (arXiv 2502.00299) is among those that decide chunk by chunk or block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from math import log, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.budget import Amount, Tokens, is_amount, kept_of_chunks
from press_core.call import AttentionCall
from press_core.errors import HyperparameterError, UnsupportedInputError
from press_core.eviction import Eviction
from press_core.fields import above, count, limited, require
from press_core.model.sites import AttentionSite, n_layers_of, site_of
from press_core.press import Press
from press_core.scoring import READS, BudgetPress, Composition, Wrapper, acts_in_prefill_only
from press_core.select import best_first, gather_tokens, top_positions, upcast
from press_core.traits import Evicts, Needs, Phase


def _is_list(given: Any) -> bool:
    listed = isinstance(given, (list, tuple)) and len(given) > 0
    return listed and all(isinstance(press, Press) for press in given)


@dataclass
class Composed(Composition):
    """Runs presses one after the other, each on what the former has left.

    Hidden states, queries and positions follow what is kept, so that any order works. A press that
    evicts other tokens of each head can only be the last.

    Attributes:
        presses: of the same mechanism, in the order in which they act.
    """

    presses: Sequence[Press] = limited(MISSING, _is_list, "a list of at least one press")

    def validate(self) -> None:
        super().validate()
        fits = all(map(acts_in_prefill_only, self.presses))
        require(self, "presses", fits, "presses that act after the prefill")
        alone = any(press.evicts.needs_attention for press in self.presses[:-1])
        allowed = "such that one that evicts by head, or frees channels, is the last"
        require(self, "presses", not alone, allowed)
        by_head = self.presses[-1].evicts is Evicts.PER_HEAD
        rotated = any(Needs.NEW_POSITIONS in press.needs for press in self.presses)
        allowed = "such that no press rerotates keys where the last evicts by head"
        require(self, "presses", not (by_head and rotated), allowed)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        """A copy whose presses share what is to be evicted as these do."""
        presses, done, told = list(self.presses), 0.0, compression_ratio
        for index, weight in _shares(self.presses).items():
            if isinstance(told, Tokens):  # the presses before have gone a part of the way
                progress = told.progress * weight / (1 - told.progress * done)
                share: Amount = Tokens(told.n, min(1.0, progress))
            else:
                share = 1 - (1 - told) ** weight
            presses[index] = presses[index].with_ratio(share)
            done += weight
        return self.changed(presses=presses)

    @property
    def amount(self) -> Amount:
        return 1 - prod(1 - press.requested_ratio for press in self.presses)

    def compress(self, call: AttentionCall) -> Eviction:
        eviction = Eviction.nothing(call)
        for press in self.presses:
            eviction = eviction.then(press.evict(eviction.next_call()))
        return eviction


def _shares(presses: Sequence[Press]) -> dict[int, float]:
    """By its place, how much of what is evicted each press evicts that can be told; 1 in all.

    Raises:
        HyperparameterError: if none can be told.
    """
    kept = {}
    for index, press in enumerate(presses):
        with suppress(HyperparameterError):
            press.with_ratio(0.5)
            kept[index] = 1 - press.requested_ratio
    if not kept:
        presses[-1].with_ratio(0.5)  # says what to do
    total = log(prod(kept.values()))
    return {i: log(share) / total if total else 1 / len(kept) for i, share in kept.items()}


@dataclass
class PerLayerCompression(Wrapper):
    """Gives each layer a compression ratio of its own.

    Attributes:
        press: can be told a compression ratio.
        compression_ratios: one in [0, 1), or the `Tokens` to keep, for each layer of the model, in
            order.
    """

    press: Press = limited(
        MISSING,
        lambda x: (
            x.evicts in (Evicts.TOKENS, Evicts.PER_HEAD)
            and acts_in_prefill_only(x)
            and Phase.AFTER_DECODER not in x.phases
        ),
        "a press that evicts tokens after the prefill, from each layer by itself",
    )
    compression_ratios: Sequence[Amount] = limited(
        MISSING,
        lambda x: isinstance(x, (list, tuple)) and all(map(is_amount, x)),
        "numbers in [0, 1) or Tokens, one per layer",
    )

    def validate(self) -> None:
        super().validate()
        for ratio in self.compression_ratios:
            self.press.with_ratio(ratio)

    @property
    def amount(self) -> Amount:
        told = [ratio for ratio in self.compression_ratios if not isinstance(ratio, Tokens)]
        return sum(told) / len(self.compression_ratios)

    def compress(self, call: AttentionCall) -> Eviction:
        told = [ratio.n for ratio in self.compression_ratios if isinstance(ratio, Tokens)]
        n_layers = len(self.compression_ratios)
        if len(told) == n_layers and call.length <= sum(told) / n_layers:
            return Eviction.nothing(call)
        ratio = self.compression_ratios[call.site.layer_idx]
        return self.press.with_ratio(ratio).evict(call)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        return Press.with_ratio(self, compression_ratio)

    def with_budget(self, tokens: int) -> Press:
        """A copy that keeps so many tokens on average, each layer as large a part as in this."""
        parts = [r.n if isinstance(r, Tokens) else 1 - r for r in self.compression_ratios]
        mean = sum(parts) / len(parts)
        numbers = [Tokens(max(1, round(tokens * part / mean))) for part in parts]
        return self.changed(compression_ratios=numbers)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        n_layers = n_layers_of(site)
        if len(self.compression_ratios) != n_layers:
            raise HyperparameterError(
                f"{type(self).__name__}: {len(self.compression_ratios)} compression_ratios for a "
                f"model of {n_layers} layers; give one per layer"
            )


@dataclass
class KeyRerotation(Wrapper):
    """Prunes, then turns each kept key to its new position `0 ... n - 1`.

    Later positions continue from `n`, also where the model counts otherwise.

    Attributes:
        press: evicts as many tokens of each head.
    """

    press: Press = limited(
        MISSING,
        lambda x: x.evicts is Evicts.TOKENS and acts_in_prefill_only(x),
        "a press that evicts as many tokens of each head, after the prefill",
    )

    needs = Needs.ROPE | Needs.NEW_POSITIONS

    def compress(self, call: AttentionCall) -> Eviction:
        return self.press.evict(call).rerotated()

    @staticmethod
    def rerotate_keys(module: Any, indices: Tensor, keys: Tensor) -> Tensor:
        """Some keys, turned to the positions `0 ... n - 1`; for presses that call it themselves.

        Args:
            module: what the press is handed: the module in hook presses, `call.site` in others.
            indices: `(B, H_kv, n)` int64, which of the `S` keys.
            keys: `(B, H_kv, S, d)`, each rotated to its own place in the context.

        Returns:
            `(B, H_kv, n, d)`, in the dtype of `keys`.

        Raises:
            UnsupportedInputError: if `module` does not come from an open scope, or has no RoPE.
        """
        site = site_of(getattr(module, "_site", module))  # a view holds it in a slot
        if site.rotary is None:
            raise UnsupportedInputError(f"{site.name} has no rotary position embeddings to turn")
        positions = torch.arange(indices.shape[-1], device=keys.device).view(1, 1, -1)
        chosen = gather_tokens(keys, indices)
        before_rope = site.rotary.rotate_from(chosen, indices + site.rotary.first_position)
        return site.rotary.rotate_to(before_rope, positions).to(keys.dtype)


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
        reads = self.press.needs & (READS | Needs.ROPE)
        return Phase.PREFILL if reads else Phase.IN_PREFILL

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        tokens = torch.arange(call.length, device=call.keys.device).expand(call.keys.shape[:3])
        kept = tokens[..., :n]
        for block in tokens[..., n:].split(self.block_size, dim=-1):
            candidates = torch.cat((kept, block), dim=-1)
            kept = candidates[..., -n:]
            if self.is_long_enough(candidates.shape[-1]):  # else there are too few to judge
                scores = self.scorer.checked_scores(call.select(candidates).with_budget(n))
                kept = candidates.gather(-1, top_positions(scores, n))
        return Eviction.keep(call, kept)


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
    ranks = means.argsort(descending=True).argsort().repeat_interleave(chunk_length)[:length]
    ranks = ranks.masked_fill(late, len(chunks))
    return by_score[ranks[by_score].argsort(stable=True)]


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
