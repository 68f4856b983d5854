"""Presses that judge keys and values by themselves: by norms, directions, variation and leverage.

Leverage is that of Compactor (arXiv 2507.08143) and CurDKV (2509.15038). ThinK (Xu et al.,
2407.21018) judges the channels of keys, by the last queries.
"""

from __future__ import annotations

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


@dataclass
class Knorm(RatioScorer):
    """Keeps the keys of smallest L2 norm (Devoto et al., arXiv 2406.11430)."""

    independent = True
    needs = Needs.KEY_NORMS

    def score(self, call: AttentionCall) -> Tensor:
        return knorm_scores(call.keys)


def knorm_scores(keys: Tensor) -> Tensor:
    """Negative L2 norm of each key: `(B, H_kv, S, d)` to `(B, H_kv, S)`."""
    return -torch.linalg.vector_norm(upcast(keys), dim=-1)


@dataclass
class KeyDiff(RatioScorer):
    """Keeps the keys that point away from the mean direction (Park et al., arXiv 2504.15364)."""

    def score(self, call: AttentionCall) -> Tensor:
        """Negative cosine between each key and the mean of the unit keys."""
        keys = upcast(call.keys)
        inverse = keys.norm(dim=-1).clamp(min=torch.finfo(keys.dtype).tiny).reciprocal()
        anchor = normalize(inverse.unsqueeze(2) @ keys, dim=-1)  # (B, H_kv, 1, d)
        return -(keys @ anchor.mT).squeeze(-1) * inverse


@dataclass
class LagKV(RatioScorer):
    """Keeps the tokens of each block that vary most against the next (arXiv 2504.04704).

    Contexts shorter than `n_sink + 2 * lag_size` keep their sinks and most recent tokens.

    Attributes:
        n_sink: first tokens, always kept.
        lag_size: tokens per block; the last full block and the rest after it are always kept.
        cross_scoring: compare scores across blocks, rather than ranks within each.
    """

    n_sink: int = count(4)
    lag_size: int = count(128, 1)
    cross_scoring: bool = False

    def score(self, call: AttentionCall) -> Tensor:
        """How much keys and values of a block vary by the range of the next one, in [0, 1]."""
        keys, n_sink, lag = call.keys, self.n_sink, self.lag_size
        n_blocks = (call.length - n_sink) // lag
        if n_blocks < 2:
            recency = torch.arange(call.length, device=keys.device, dtype=torch.float32)
            return protect((recency / call.length).expand(keys.shape[:3]), leading(keys, n_sink))
        end = n_sink + n_blocks * lag
        states = (upcast(x[:, :, n_sink:end]) for x in (keys, call.values))
        of_keys, of_values = (_variation(x.unflatten(2, (n_blocks, lag))) for x in states)
        scores = (of_keys + of_values) / 2  # (B, H_kv, n_blocks - 1, lag)
        if not self.cross_scoring:
            scores = scores.argsort(dim=-1).argsort(dim=-1) / lag
        return with_ends(scores.flatten(2), n_sink, call.length - end + lag)


def _variation(blocks: Tensor) -> Tensor:
    """`(B, H_kv, n_blocks, lag, d)` to `(B, H_kv, n_blocks - 1, lag)`."""
    judged, reference = blocks[:, :, :-1], blocks[:, :, 1:]
    low, high = reference.amin(dim=-2, keepdim=True), reference.amax(dim=-2, keepdim=True)
    spread = torch.where(high > low, high - low, 1)  # a constant channel has no range to divide by
    scaled = (judged - low).div_(spread)
    # The standard deviation, which torch's own takes ten times as long for.
    centred = scaled.sub_(scaled.mean(dim=-1, keepdim=True))
    deviation = centred.norm(dim=-1) / (scaled.shape[-1] - 1) ** 0.5
    return deviation.softmax(dim=-1)


# ---- leverage ------------------------------------------------------------------------------------


@dataclass
class LeverageScore(RatioScorer):
    """Keeps the keys that the others cannot make up (Chari and Van Durme, arXiv 2507.08143).

    The sketch is the same in every run, on every device and for every row of a batch: it depends on
    the layer alone.

    Attributes:
        sketch_dimension: channels that a Gaussian sketch leaves of each key.
    """

    sketch_dimension: int = count(48, 1)

    def score(self, call: AttentionCall) -> Tensor:
        return leverage_scores(call.keys_before_rope(), self.sketch_dimension, call.site.layer_idx)


_RIDGE = 1e-2
"""Added to the eigenvalues of the Gram matrix; that of kvpress."""


def leverage_scores(keys: Tensor, sketch_dimension: int, layer_idx: int) -> Tensor:
    """Leverage of each key in the sketched, centred keys of its head, standardised.

    Args:
        keys: `(B, H_kv, S, d)`, before RoPE.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    keys = upcast(keys)
    projection = sketch((keys.shape[1], keys.shape[3], sketch_dimension), layer_idx, keys)
    sketched = keys @ (projection / sketch_dimension**0.5)
    sketched -= sketched.mean(dim=2, keepdim=True)  # of fewer channels than the keys have
    del keys  # as large as a layer
    gram = sketched.mT @ sketched  # (B, H_kv, s, s)
    identity = torch.eye(sketch_dimension, device=gram.device, dtype=gram.dtype)
    factor, failed = torch.linalg.cholesky_ex(gram + _RIDGE * identity)
    if failed.any():
        # Large keys of low rank: the ridge is lost in the rounding of the Gram matrix, which is
        # a share of its trace.
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        more = (failed > 0) * 64 * torch.finfo(gram.dtype).eps * trace
        factor, _ = torch.linalg.cholesky_ex(gram + (_RIDGE + more)[..., None, None] * identity)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    return standardised((sketched @ inverse.mT).square_().sum(dim=-1))


def sketch(shape: tuple[int, ...], layer_idx: int, like: Tensor) -> Tensor:
    """Standard normal numbers that depend on the layer alone, with device and dtype of `like`."""
    generator = torch.Generator().manual_seed(layer_idx)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(like)


def standardised(scores: Tensor) -> Tensor:
    """Scores `(B, H_kv, S)` with mean 0 and standard deviation 1 over each row of the batch.

    All heads of a row are taken together, so that they still compare.
    """
    centred = scores - scores.mean(dim=(1, 2), keepdim=True)
    degrees = max(1, scores[0].numel() - 1)
    variance = centred.square().sum(dim=(1, 2), keepdim=True) / degrees
    return centred / variance.sqrt().clamp(min=1e-6)


@dataclass
class NonCausalAttn(RatioScorer):
    """Keeps what is attended to from both sides within its chunk (arXiv 2507.08143).

    Attributes:
        chunk_size: tokens that attend to each other; a shorter last chunk is one by itself.
    """

    chunk_size: int = count(256, 1)

    needs = Needs.QUERIES

    def score(self, call: AttentionCall) -> Tensor:
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


@dataclass
class Compactor(RatioScorer):
    """Keeps keys of high leverage and much non-causal attention (arXiv 2507.08143).

    Contexts of at most `sink_size_start + sink_size_end` tokens are left whole.

    Attributes:
        sink_size_start, sink_size_end: first and last tokens, left out of all statistics and
            always kept.
        chunk_size: tokens that attend to each other; see `NonCausalAttn`.
        sketch_dimension: channels that are left of each key; see `LeverageScore`.
        blending: weight of the leverage beside the attention; None: the share of tokens evicted.
    """

    sink_size_start: int = count(8)
    sink_size_end: int = count(4)
    chunk_size: int = count(256, 1)
    sketch_dimension: int = count(48, 1)
    blending: float | None = count(None, of="a number, ")

    needs = Needs.QUERIES
    whole_up_to = "sink_size_start", "sink_size_end"

    def score(self, call: AttentionCall) -> Tensor:
        """Leverage and non-causal attention of the tokens between the two ends, blended."""
        first, last = self.sink_size_start, self.sink_size_end
        middle, layer = slice(first, call.length - last), call.site.layer_idx
        # Keys before RoPE are as large as a layer: nothing here holds on to them.
        leverage = leverage_scores(
            call.keys_before_rope()[:, :, middle], self.sketch_dimension, layer
        )
        states = queries_of_all_keys(call), call.keys, call.values
        queries, keys, values = (x[:, :, middle] for x in states)
        attention = non_causal_scores(queries, keys, values, self.chunk_size)
        blending = self.blending
        if blending is None:
            given = call.budget
            blending = self.ratio_of(call.length) if given is None else 1 - given / call.length
        return with_ends(blending * leverage + attention, first, last)


@dataclass
class CUR(RatioScorer):
    """Keeps the rows that a CUR decomposition of keys and values would (arXiv 2509.15038).

    Contexts of at most `num_sinks` tokens are left whole.

    Attributes:
        num_sinks: first tokens, always kept.
        leverage_type: whose leverage counts: the keys', the values', the mean or the product.
        use_random_leverage: project the states to 20 random channels first (the same in every run).
        use_local_approximation: count each token as a share of its window.
        local_window_size: tokens per window, counted from the start; the last may be shorter.
    """

    num_sinks: int = count(4)
    leverage_type: Literal["key", "value", "kv_avg", "kv_product"] = "kv_product"
    use_random_leverage: bool = False
    use_local_approximation: bool = True
    local_window_size: int = count(16, 1)

    whole_up_to = ("num_sinks",)

    def score(self, call: AttentionCall) -> Tensor:
        """Squared norms of keys and values, each as a share of its window, combined."""
        key, value = (self._leverage(x, call.site.layer_idx) for x in (call.keys, call.values))
        combined = {
            "key": key,
            "value": value,
            "kv_avg": (key + value) / 2,
            "kv_product": key * value,
        }
        scores = _shares(combined[self.leverage_type])
        return protect(scores, leading(call.keys, self.num_sinks))

    def _leverage(self, states: Tensor, layer_idx: int) -> Tensor:
        """`(B, H_kv, S, d)` to `(B, H_kv, S)`."""
        states = upcast(states)
        if self.use_random_leverage:
            states = states @ sketch((states.shape[-1], _RANDOM_CHANNELS), layer_idx, states)
        squares = states.norm(dim=-1).square()
        if not self.use_local_approximation:
            return squares
        length, width = squares.shape[-1], self.local_window_size
        windows = pad(squares, (0, -length % width)).unflatten(-1, (-1, width))
        return _shares(windows).flatten(-2)[..., :length]


_RANDOM_CHANNELS = 20


def _shares(x: Tensor) -> Tensor:
    """`x` divided by its sum over the last dimension; zeros stay what they are."""
    return x / x.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


@dataclass
class ThinK(Press):
    """Drops the channels of the keys that the last queries need least (arXiv 2407.21018).

    Attributes:
        key_channel_compression_ratio: share of the channels that each KV head drops, in [0, 1).
        window_size: last tokens, whose queries decide.
        free_memory: store the kept channels only; attention then cuts queries to the same
            channels. By default dropped channels are set to zero, which saves nothing.
    """

    key_channel_compression_ratio: float = limited(0.0, lambda x: 0 <= x < 1, "a number in [0, 1)")
    window_size: int = count(32, 1)
    free_memory: bool = False

    needs = Needs.QUERIES

    @property
    def requested_ratio(self) -> float:
        return self.key_channel_compression_ratio / 2  # values keep all channels

    @property
    def compression_ratio(self) -> float:
        """Share of the cache that is dropped."""
        return self.requested_ratio

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
        """Mean square of the last queries, times the mean square of the keys: `(B, H_kv, d)`."""
        queries = upcast(call.queries(self.window_size)).square().mean(dim=2)  # (B, H, d)
        per_group = queries.unflatten(1, (call.keys.shape[1], -1)).mean(dim=2)
        return per_group * upcast(call.keys).square().mean(dim=2)
