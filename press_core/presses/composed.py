"""Presses that wrap presses: in sequence, with a ratio per layer, rerotated, or chunk by chunk."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from functools import reduce
from math import log, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.budget import Amount, Tokens, is_amount, kept_of_chunks, n_kept
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
    """Applies presses in sequence, each to the tokens that the previous one kept.

    Hidden states, queries and positions follow the kept tokens, so that any order works. A press
    that evicts per head (AdaKV, DMS) or frees key channels can only be the last one. The total
    ratio is `1 - Π(1 - r_i)`.

    Attributes:
        presses: presses of the same mechanism that act after the prefill, in the order in which
            they act.
    """

    presses: Sequence[Press] = limited(MISSING, _is_list, "a list of at least one press")

    def validate(self) -> None:
        super().validate()
        fits = all(map(acts_in_prefill_only, self.presses))
        require(self, "presses", fits, "presses that act after the prefill")
        alone = any(press.evicts.needs_attention for press in self.presses[:-1])
        allowed = "ordered so that one that evicts per head, or frees channels, is the last"
        require(self, "presses", not alone, allowed)
        by_head = self.presses[-1].evicts is Evicts.PER_HEAD
        rotated = any(press.needs & Needs.NEW_POSITIONS for press in self.presses)
        allowed = "without a press that rerotates keys, as the last one evicts per head"
        require(self, "presses", not (by_head and rotated), allowed)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        """A copy with this total ratio, divided over the presses in the same proportions."""
        if not is_amount(compression_ratio):
            raise HyperparameterError(
                f"{type(self).__name__}.with_ratio({compression_ratio!r:.80}): a ratio is a number "
                "in [0, 1), or the Tokens to keep"
            )
        presses, done, total = list(self.presses), 0.0, compression_ratio
        for index, weight in _shares(self.presses).items():
            if isinstance(total, Tokens):  # previous presses have covered the part `done`
                left = max(1e-12, 1 - total.progress * done)  # 0 before presses without a ratio
                progress = total.progress * weight / left
                share: Amount = Tokens(total.n, min(1.0, progress))
            else:
                share = 1 - (1 - total) ** weight
            presses[index] = presses[index].with_ratio(share)
            done += weight
        return self.changed(presses=presses)

    @property
    def amount(self) -> Amount:
        return 1 - prod(1 - press.requested_ratio for press in self.presses)

    def keeps(self, length: int) -> int:
        return reduce(lambda n, press: press.keeps(n), self.presses, length)

    def compress(self, call: AttentionCall) -> Eviction:
        eviction = Eviction.nothing(call)
        for press in self.presses:
            eviction = eviction.then(press.evict(eviction.next_call()))
        return eviction


def _shares(presses: Sequence[Press]) -> dict[int, float]:
    """By index, each press's part of the total compression, in logarithms; the parts sum to 1.

    Presses that take no ratio are left out, unless they evict a share of the tokens all the same.

    Raises:
        HyperparameterError: if no press takes a ratio, or one evicts a share that cannot be set.
    """
    kept = {}
    for index, press in enumerate(presses):
        try:
            press.with_ratio(0.5)
            kept[index] = 1 - press.requested_ratio
        except HyperparameterError:
            if press.requested_ratio and press.evicts in (Evicts.TOKENS, Evicts.PER_HEAD):
                raise
    if not kept:
        presses[-1].with_ratio(0.5)  # raises, and its message says what to do
    total = log(prod(kept.values()))
    return {i: log(share) / total if total else 1 / len(kept) for i, share in kept.items()}


@dataclass
class PerLayerCompression(Composition):
    """Keeps what the wrapped press keeps, with a separate compression ratio for each layer.

    Attributes:
        press: a press with a compression ratio, which decides about each layer separately.
        compression_ratios: for each layer of the model, in order, a ratio in [0, 1) or the `Tokens`
            to keep.
    """

    press: Press = limited(
        MISSING,
        lambda x: (
            x.evicts in (Evicts.TOKENS, Evicts.PER_HEAD)
            and acts_in_prefill_only(x)
            and not x.phases & Phase.AFTER_DECODER
        ),
        "a press that evicts tokens after the prefill, from each layer separately",
    )
    compression_ratios: Sequence[Amount] = limited(
        MISSING,
        lambda x: isinstance(x, (list, tuple)) and len(x) > 0 and all(map(is_amount, x)),
        "numbers in [0, 1) or Tokens, one per layer",
    )

    def validate(self) -> None:
        super().validate()
        for ratio in self.compression_ratios:
            self.press.with_ratio(ratio)

    @property
    def amount(self) -> Amount:
        numbers = [ratio for ratio in self.compression_ratios if not isinstance(ratio, Tokens)]
        return sum(numbers) / len(self.compression_ratios)

    def acts_on(self, length: int) -> bool:
        presses = map(self.press.with_ratio, self.compression_ratios)
        return not self._fits(length) and any(press.acts_on(length) for press in presses)

    def keeps(self, length: int) -> int:
        kept = [self.press.with_ratio(ratio).keeps(length) for ratio in self.compression_ratios]
        return length if self._fits(length) else sum(kept) // len(kept)

    def _fits(self, length: int) -> bool:
        """Whether a context is no longer than the mean of the `Tokens`, if there is no ratio."""
        counts = [ratio.n for ratio in self.compression_ratios if isinstance(ratio, Tokens)]
        n_layers = len(self.compression_ratios)
        return len(counts) == n_layers and length * n_layers <= sum(counts)

    def compress(self, call: AttentionCall) -> Eviction:
        if self._fits(call.length):
            return Eviction.nothing(call)
        ratio = self.compression_ratios[call.site.layer_idx]
        return self.press.with_ratio(ratio).evict(call)

    def with_budget(self, tokens: int) -> Press:
        """A copy that keeps `tokens` on average over layers, in the proportions of this one.

        Raises:
            HyperparameterError: if some layers have `Tokens` and others a ratio.
        """
        kinds = {isinstance(ratio, Tokens) for ratio in self.compression_ratios}
        allowed = "all ratios or all Tokens for with_budget, which keeps their proportions"
        require(self, "compression_ratios", len(kinds) == 1, allowed)
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
    """Keeps what the wrapped press keeps, with keys rerotated to the positions `0 ... n - 1`.

    New tokens continue at position `n`, even if the model passes other positions.

    Attributes:
        press: evicts tokens after the prefill, the same number from each head.
    """

    press: Press = limited(
        MISSING,
        lambda x: x.evicts is Evicts.TOKENS and acts_in_prefill_only(x),
        "a press that evicts the same number of tokens from each head, after the prefill",
    )

    needs = Needs.ROPE | Needs.NEW_POSITIONS

    def keeps(self, length: int) -> int:
        return self.press.keeps(length)

    def compress(self, call: AttentionCall) -> Eviction:
        return self.press.evict(call).rerotated()

    @staticmethod
    def rerotate_keys(module: Any, indices: Tensor, keys: Tensor) -> Tensor:
        """The keys at `indices`, rotated to the positions `0 ... n - 1`; for presses of your own.

        Args:
            module: the module that a hook press is given, or `call.site`.
            indices: `(B, H_kv, n)` int64, indices of the kept keys among the `S`.
            keys: `(B, H_kv, S, d)`, rotated to their positions in the context.

        Returns:
            `(B, H_kv, n, d)`, in the dtype of `keys`.

        Raises:
            UnsupportedInputError: if `module` does not come from an open scope, or has no RoPE.
        """
        site = site_of(module)
        if site.rotary is None:
            raise UnsupportedInputError(f"{site.name} has no rotary position embeddings")
        positions = torch.arange(indices.shape[-1], device=keys.device).view(1, 1, -1)
        chosen = gather_tokens(keys, indices)
        before_rope = site.rotary.rotate_from(chosen, indices + site.rotary.first_position)
        return site.rotary.rotate_to(before_rope, positions).to(keys.dtype)


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
        if call.length < self.chunk_length:
            return self.press.evict(call)
        per_token = upcast(self.scorer.checked_scores(call)).sum(dim=(0, 1))
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
        reads = self.press.needs & (READS | Needs.ROPE)
        return Phase.PREFILL if reads else Phase.IN_PREFILL

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        tokens = torch.arange(call.length, device=call.keys.device).expand(call.keys.shape[:3])
        kept = tokens[..., :n]
        for block in tokens[..., n:].split(int(self.block_size), dim=-1):
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

    A chunk with negative scores is shifted so that its minimum is 0. A single token has entropy 0.

    Args:
        chunks: `(n, c)`.
        held: `(n, c)` bool, true for tokens, false for padding.
    """
    least = chunks.masked_fill(~held, float("inf")).amin(dim=-1, keepdim=True).clamp(max=0)
    raised = (chunks - least) * held
    shares = raised / raised.sum(dim=-1, keepdim=True).clamp(min=1e-12)
    counts = held.sum(dim=-1).clamp(min=2)
    return -torch.xlogy(shares, shares).sum(dim=-1) / counts.log()
