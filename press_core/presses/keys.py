"""Presses that score tokens by their keys and values: norms, directions, variation and leverage.

Leverage scores follow Compactor (arXiv 2507.08143) and CurDKV (2509.15038). ThinK (Xu et al.,
2407.21018) scores key channels instead of tokens, with the queries of the observation window.

All presses here but ThinK have the field `compression_ratio`: the share of the tokens that each KV
head evicts, in [0, 1), or the `Tokens` that it keeps.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, normalize, pad

from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import count, limited
from press_core.press import Press
from press_core.scoring import RatioScorer
from press_core.select import best_first, leading, protect, true_indices, upcast, with_ends
from press_core.traits import Evicts, Needs


class Knorm(RatioScorer):
    """Keeps the keys with the smallest L2 norm (Devoto et al., arXiv 2406.11430).

    The score is `-‖k‖₂`.
    """

    independent = True
    needs = Needs.KEY_NORMS

    def score(self, call: AttentionCall) -> Tensor:
        return knorm_scores(call.keys)


def knorm_scores(keys: Tensor) -> Tensor:
    """Negative L2 norm of each key: `(B, H_kv, S, d)` to `(B, H_kv, S)`."""
    return -torch.linalg.vector_norm(upcast(keys), dim=-1)


class KeyDiff(RatioScorer):
    """Keeps the keys least similar to the mean key direction (Park et al., arXiv 2504.15364).

    The score is `-cos(k, a)`, with the anchor `a` the mean of the normalized keys of the KV head.
    """

    def score(self, call: AttentionCall) -> Tensor:
        """Negative cosine similarity of each key and the mean of the normalized keys."""
        keys = upcast(call.keys)
        inverse = keys.norm(dim=-1).clamp(min=torch.finfo(keys.dtype).tiny).reciprocal()
        anchor = normalize(inverse.unsqueeze(2) @ keys, dim=-1)  # (B, H_kv, 1, d)
        return -(keys @ anchor.mT).squeeze(-1) * inverse


@dataclass
class LagKV(RatioScorer):
    """Keeps the tokens that vary most across channels, relative to the next block (2504.04704).

    After the sinks, the context is split into blocks of `lag_size` tokens. Keys and values of a
    block are min-max normalized per channel with the range of the next block (its lag reference).
    A token's score is the standard deviation over channels, softmaxed within the block and averaged
    over keys and values. Contexts shorter than `n_sink + 2 * lag_size` tokens keep their sinks and
    most recent tokens instead.

    Attributes:
        n_sink: number of first tokens (attention sinks), always kept.
        lag_size: tokens per block; the last full block and the tokens after it are always kept.
        cross_scoring: rank tokens by their scores across blocks. By default they are ranked within
            each block, so that every block keeps about the same share.
    """

    n_sink: int = count(4)
    lag_size: int = count(128, 1)
    cross_scoring: bool = False

    def score(self, call: AttentionCall) -> Tensor:
        """Variation of keys and values in the range of the next block, in [0, 1].

        Protected tokens get higher scores.
        """
        keys, n_sink, lag = call.keys, self.n_sink, self.lag_size
        n_blocks = (call.length - n_sink) // lag
        if n_blocks < 2:
            recency = torch.arange(call.length, device=keys.device, dtype=torch.float32)
            return protect((recency / call.length).expand(keys.shape[:3]), leading(keys, n_sink))
        end = n_sink + n_blocks * lag
        states = (upcast(x[:, :, n_sink:end]) for x in (keys, call.values))
        of_keys, of_values = (_variation(x.unflatten(2, (n_blocks, lag))) for x in states)
        scores = (of_keys + of_values) / 2  # (B, H_kv, n_blocks - 1, lag)
        last = call.length - end + lag
        if self.cross_scoring:
            return with_ends(scores.flatten(2), n_sink, last)
        ranks = scores.argsort(dim=-1).argsort(dim=-1).to(scores.dtype) / lag
        return with_ends(ranks.flatten(2), n_sink, last, gap=0.5 / lag)


def _variation(blocks: Tensor) -> Tensor:
    """Softmaxed deviations: `(B, H_kv, n_blocks, lag, d)` to `(B, H_kv, n_blocks - 1, lag)`."""
    scored, reference = blocks[:, :, :-1], blocks[:, :, 1:]
    low, high = reference.amin(dim=-2, keepdim=True), reference.amax(dim=-2, keepdim=True)
    spread = torch.where(high > low, high - low, 1)  # a constant channel has no range to divide by
    scaled = (scored - low).div_(spread)
    # `torch.std` takes ten times as long.
    centred = scaled.sub_(scaled.mean(dim=-1, keepdim=True))
    deviation = centred.norm(dim=-1) / (scaled.shape[-1] - 1) ** 0.5
    return deviation.softmax(dim=-1)


# ---- leverage ------------------------------------------------------------------------------------


@dataclass
class LeverageScore(RatioScorer):
    """Keeps the keys with the highest statistical leverage (Chari and Van Durme, 2507.08143).

    A key of high leverage is poorly approximated by linear combinations of the others. With `X` the
    keys before RoPE, centred over the sequence and multiplied by a Gaussian sketch, the score is
    `diag(X (XᵀX + λI)⁻¹ Xᵀ)`, z-scored over the heads and tokens of a row. The sketch depends on
    the layer alone: it is the same in every run, on every device and for every row of a batch.

    Attributes:
        sketch_dimension: number of channels that the sketch projects each key to.
    """

    sketch_dimension: int = count(48, 1)

    needs = Needs.UNROTATED_KEYS

    def score(self, call: AttentionCall) -> Tensor:
        return leverage_scores(call.keys_before_rope(), self.sketch_dimension, call.site.layer_idx)


_RIDGE = 1e-2
"""Ridge `λ` added to the diagonal of the Gram matrix; the value of kvpress."""


def leverage_scores(keys: Tensor, sketch_dimension: int, layer_idx: int) -> Tensor:
    """Leverage of each key among the sketched, centred keys of its KV head, z-scored.

    Args:
        keys: `(B, H_kv, S, d)`, before RoPE.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    keys = upcast(keys)
    projection = sketch((keys.shape[1], keys.shape[3], sketch_dimension), layer_idx, keys)
    sketched = keys @ (projection / sketch_dimension**0.5)
    sketched -= sketched.mean(dim=2, keepdim=True)  # after the sketch: fewer channels
    del keys  # frees a tensor as large as the layer's keys
    factor, identity = ridge_root(sketched.mT @ sketched, _RIDGE)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    return standardised((sketched @ inverse.mT).square_().sum(dim=-1))


def ridge_root(gram: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Cholesky factor of a Gram matrix `(..., d, d)` plus `ridge` times the identity, and that."""
    identity = torch.eye(gram.shape[-1], device=gram.device, dtype=gram.dtype)
    factor, failed = torch.linalg.cholesky_ex(gram + ridge * identity)  # passes NaN on
    if failed.any():
        # For large states of low rank, the ridge vanishes in the rounding error of the Gram matrix,
        # which is proportional to its trace.
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        more = (failed > 0) * 64 * torch.finfo(gram.dtype).eps * trace
        factor, _ = torch.linalg.cholesky_ex(gram + (ridge + more)[..., None, None] * identity)
    return factor, identity


def sketch(shape: tuple[int, ...], layer_idx: int, like: Tensor) -> Tensor:
    """Standard normal numbers seeded by the layer alone, with device and dtype of `like`."""
    generator = torch.Generator().manual_seed(layer_idx)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(like)


def standardised(scores: Tensor) -> Tensor:
    """Scores `(B, H_kv, S)` z-scored over each row of the batch: mean 0, standard deviation 1.

    The statistics are shared by all heads of a row, so that scores stay comparable across heads.
    """
    centred = scores - scores.mean(dim=(1, 2), keepdim=True)
    degrees = max(1, scores[0].numel() - 1)
    variance = centred.square().sum(dim=(1, 2), keepdim=True) / degrees
    return centred / variance.sqrt().clamp(min=1e-6)


@dataclass
class NonCausalAttn(RatioScorer):
    """Keeps the tokens that receive most non-causal attention in their chunk (arXiv 2507.08143).

    Within each chunk, all queries attend to all keys: softmax of the unscaled dot products, without
    a causal mask. The score is the attention that a key receives from the chunk's queries, mean
    over the GQA group, times `‖v‖₂`, average-pooled over 3 tokens and z-scored.

    Attributes:
        chunk_size: tokens per chunk; the last one may be shorter.
    """

    chunk_size: int = count(256, 1)

    needs = Needs.QUERIES

    def score(self, call: AttentionCall) -> Tensor:
        return non_causal_scores(queries_of_all_keys(call), call.keys, call.values, self.chunk_size)


_ROWS = 1024
"""Number of queries of a KV head whose attention weights are in memory at the same time."""


def non_causal_scores(queries: Tensor, keys: Tensor, values: Tensor, chunk_size: int) -> Tensor:
    """Attention that each key receives in its chunk, unmasked and unscaled, times `‖v‖₂`.

    Averaged over the GQA group, average-pooled over 3 tokens and z-scored.

    Args:
        queries: `(B, H, S, d)`, after RoPE.
        keys, values: `(B, H_kv, S, d)`; keys after RoPE.

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
    weighted = received / (queries.shape[1] // n_kv) * upcast(values).norm(dim=-1)
    return standardised(avg_pool1d(weighted, kernel_size=3, stride=1, padding=1))


def queries_of_all_keys(call: AttentionCall) -> Tensor:
    """A query after RoPE for each key, `(B, H, S, d)`: that of the key's own token if known.

    While decoding, only the last `q` queries are known: older keys cycle through these.
    """
    queries = call.queries()
    n_known = queries.shape[2]
    if n_known == call.length:
        return queries
    cycle = torch.arange(n_known - call.length, n_known, device=queries.device) % n_known
    return queries[:, :, cycle]


@dataclass
class Compactor(RatioScorer):
    """Keeps the tokens with the best blend of leverage and non-causal attention (2507.08143).

    The score is `blending * leverage + attention`, of `LeverageScore` and `NonCausalAttn` over the
    tokens between the two protected ends. Contexts of at most `sink_size_start + sink_size_end`
    tokens are not pruned.

    Attributes:
        sink_size_start, sink_size_end: number of first and last tokens, always kept and left out of
            all statistics.
        chunk_size: tokens per chunk of the non-causal attention; see `NonCausalAttn`.
        sketch_dimension: number of channels that keys are projected to; see `LeverageScore`.
        blending: weight of the leverage score. None: the share of the tokens that is evicted.
    """

    sink_size_start: int = count(8)
    sink_size_end: int = count(4)
    chunk_size: int = count(256, 1)
    sketch_dimension: int = count(48, 1)
    blending: float | None = count(None, of="a number, ")

    needs = Needs.QUERIES | Needs.UNROTATED_KEYS
    whole_up_to = "sink_size_start", "sink_size_end"

    def score(self, call: AttentionCall) -> Tensor:
        """Leverage blended with non-causal attention between the ends; the ends are protected."""
        first, last, n = self.sink_size_start, self.sink_size_end, self.sketch_dimension
        middle, layer = slice(first, call.length - last), call.site.layer_idx
        # No name is bound to the keys before RoPE, so that this layer-sized tensor is freed early.
        leverage = leverage_scores(call.keys_before_rope()[:, :, middle], n, layer)
        states = queries_of_all_keys(call), call.keys, call.values
        queries, keys, values = (x[:, :, middle] for x in states)
        attention = non_causal_scores(queries, keys, values, self.chunk_size)
        blending = self.ratio_of(call) if self.blending is None else self.blending
        return with_ends(blending * leverage + attention, first, last)


@dataclass
class CUR(RatioScorer):
    """Keeps the tokens with the largest norms of keys and values (CurDKV, arXiv 2509.15038).

    These are the rows that an approximate CUR decomposition of keys and values selects. A leverage
    score is the squared L2 norm of a token's key or value, divided by the sum over its window.
    Contexts of at most `num_sinks` tokens are not pruned.

    Attributes:
        num_sinks: number of first tokens (attention sinks), always kept.
        leverage_type: which leverage scores count: "key", "value", their mean ("kv_avg") or their
            product ("kv_product").
        use_random_leverage: project keys and values to 20 random channels first; the projection
            depends on the layer alone.
        use_local_approximation: divide each squared norm by the sum over its window.
        local_window_size: tokens per window; windows start at the first token, and the last one may
            be shorter.
    """

    num_sinks: int = count(4)
    leverage_type: Literal["key", "value", "kv_avg", "kv_product"] = "kv_product"
    use_random_leverage: bool = False
    use_local_approximation: bool = True
    local_window_size: int = count(16, 1)

    whole_up_to = ("num_sinks",)

    def score(self, call: AttentionCall) -> Tensor:
        """The leverage scores chosen by `leverage_type`, divided by their sum over the tokens."""
        key, value = (self._leverage(x, call.site.layer_idx) for x in (call.keys, call.values))
        mean, product = (key + value) / 2, key * value
        combined = {"key": key, "value": value, "kv_avg": mean, "kv_product": product}
        scores = _shares(combined[self.leverage_type])
        return protect(scores, leading(call.keys, self.num_sinks))

    def _leverage(self, states: Tensor, layer_idx: int) -> Tensor:
        """Squared norms, local or not, of keys or values: `(B, H_kv, S, d)` to `(B, H_kv, S)`."""
        states = upcast(states)
        if self.use_random_leverage:
            states = states @ sketch((states.shape[-1], _RANDOM_CHANNELS), layer_idx, states)
        squares = states.norm(dim=-1).square()
        if not self.use_local_approximation:
            return squares
        length = squares.shape[-1]
        width = min(length, self.local_window_size)
        windows = pad(squares, (0, -length % width)).unflatten(-1, (-1, width))
        return _shares(windows).flatten(-2)[..., :length]


_RANDOM_CHANNELS = 20


def _shares(x: Tensor) -> Tensor:
    """`x` divided by its sum over the last dimension; all zeros stay zeros."""
    return x / x.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


@dataclass
class ThinK(Press):
    """Keeps all tokens, and of the keys the channels that queries use most (Xu et al., 2407.21018).

    A channel's score is the mean `q²` of the observation window, averaged over the GQA group, times
    the mean `k²` over all tokens. Each KV head drops the channels with the lowest scores.

    Attributes:
        key_channel_compression_ratio: share of the key channels that each KV head drops, in [0, 1).
        window_size: number of last tokens whose queries score the channels.
        free_memory: store the kept channels only; attention then reads the same channels of the
            queries. By default dropped channels are set to zero, which saves no memory.
    """

    key_channel_compression_ratio: float = limited(0.0, lambda x: 0 <= x < 1, "a number in [0, 1)")
    window_size: int = count(32, 1)
    free_memory: bool = False

    needs = Needs.QUERIES

    @property
    def requested_ratio(self) -> float:
        """Share of the cache that is dropped; values keep all channels."""
        return self.key_channel_compression_ratio / 2

    compression_ratio = requested_ratio

    def acts_on(self, length: int) -> bool:
        return self.key_channel_compression_ratio > 0

    @property
    def evicts(self) -> Evicts:
        return Evicts.CHANNELS if self.free_memory else Evicts.NOTHING

    def compress(self, call: AttentionCall) -> Eviction:
        n_channels = call.keys.shape[-1]
        n_kept = n_channels - int(n_channels * self.key_channel_compression_ratio)
        if n_kept == n_channels:
            return Eviction.nothing(call)
        kept = best_first(self.channel_scores(call), n_kept)
        if self.free_memory:
            return Eviction.keep_channels(call, true_indices(kept))
        keys = call.keys * kept.to(call.keys.dtype).unsqueeze(2)
        return Eviction.from_states(call, keys, call.values)

    def channel_scores(self, call: AttentionCall) -> Tensor:
        """Mean square of the window's queries times that of the keys, `(B, H_kv, d)`."""
        queries = upcast(call.queries(self.window_size)).square().mean(dim=2)  # (B, H, d)
        per_group = queries.unflatten(1, (call.keys.shape[1], -1)).mean(dim=2)
        return per_group * upcast(call.keys).square().mean(dim=2)
