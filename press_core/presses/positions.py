"""Presses that choose tokens by position: at random, or attention sinks and a recent window.

SimLayerKV (Zhang et al., arXiv 2410.13846) keeps sinks and a recent window in lazy layers only.

RandomPress and StreamingLLMPress have the field `compression_ratio`: the share of the tokens that
each KV head evicts, in [0, 1), or the `Tokens` that it keeps.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from press_core.attention import mean_attention
from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.eviction import Eviction
from press_core.fields import above, count, limited, share
from press_core.press import MeasuredPress
from press_core.scoring import RatioScorer, SizedPress
from press_core.select import leading, trailing
from press_core.traits import Needs, Phase


def seed_field() -> Any:
    """A press field for a random seed: None or a whole number in [0, 2**32)."""
    allowed = "None or a whole number in [0, 2**32)"
    return limited(None, lambda seed: seed is None or 0 <= seed < 2**32, allowed)


@dataclass
class Random(RatioScorer):
    """Keeps tokens drawn uniformly at random, per KV head: a baseline.

    Attributes:
        seed: seeds the draw together with `layer_idx`; the same tokens are kept on every device, in
            every row of a batch and by both mechanisms. While decoding, each pruning draws the same
            numbers, slot by slot. None: use torch's global generator.
    """

    seed: int | None = seed_field()

    needs = Needs.POSITIONS_ALONE
    independent = True

    def score(self, call: AttentionCall) -> Tensor:
        batch, n_kv, length, _ = call.keys.shape
        generator = layer_generator(self.seed, call.site.layer_idx)
        scores = torch.rand(1, n_kv, length, generator=generator, dtype=torch.float32, device="cpu")
        return scores.to(call.keys.device).repeat(batch, 1, 1)  # callers may write to them


_LAYERS = 2**16
"""More layers than any model has, so that each (seed, layer) pair gets a distinct seed."""


def layer_generator(seed: int | None, layer_idx: int) -> torch.Generator | None:
    """The CPU generator of a seed and layer; None (torch's global generator) if `seed` is None."""
    return None if seed is None else torch.Generator().manual_seed(seed * _LAYERS + layer_idx)


SINKS = "sinks before RoPE"


def sinks_and_recent(call: AttentionCall, n_first: int, n_last: int) -> Eviction:
    """Keep the `n_first` first and the `n_last` last tokens in every KV head."""
    kept = (leading(call.keys, n_first) | trailing(call.keys, n_last)).nonzero().squeeze(1)
    return Eviction.keep(call, kept.expand(*call.keys.shape[:2], -1))


@dataclass
class StreamingLLM(RatioScorer):
    """Keeps the first `n_sink` tokens and the most recent ones (Xiao et al., arXiv 2309.17453).

    Contexts of at most `n_sink` tokens are not pruned.

    Attributes:
        n_sink: number of first tokens (attention sinks), always kept; the rest of the budget goes
            to the most recent tokens.
    """

    n_sink: int = count(4)

    needs = Needs.POSITIONS_ALONE | Needs.SAME_FOR_ALL_HEADS
    whole_up_to = ("n_sink",)

    def score(self, call: AttentionCall) -> Tensor:
        """1 for the sinks and the most recent tokens within the budget, 0 for those between."""
        n_sinks = min(self.n_sink, self.budget(call))
        kept = leading(call.keys, n_sinks) | trailing(call.keys, self.budget(call) - n_sinks)
        return kept.float().repeat(*call.keys.shape[:2], 1)


@dataclass
class StreamingLLMDecoding(SizedPress):
    """Keeps sinks and a sliding window, in a bounded cache for endless generation (2309.17453).

    Before each forward over a filled cache, a layer longer than `max_capacity` keeps its first
    `n_sink` and its last `max_capacity - n_sink` tokens. If a context comes in several
    plain forwards, later ones do not attend to tokens evicted before them; between the chunks of
    `prefill` or `generate` nothing is evicted.

    Attributes:
        max_capacity: most tokens that a layer holds at the start of a forward; above `n_sink`.
        n_sink: number of first tokens (attention sinks), always kept.
        rerotate: give tokens their positions within the cache, as in the paper. Attention depends
            on distances only (RoPE), and distances within the window do not change, so the sinks
            alone are rotated towards the window; each time from their keys before RoPE, so that
            rounding errors do not add up. (Models with dynamic NTK, whose frequencies change with
            the length, rotate keys of one cache by several of them, and these sinks by the latest.)
    """

    max_capacity: int = above("n_sink", 256)
    n_sink: int = count(4)
    rerotate: bool = False

    phases = Phase.BEFORE_DECODING
    size_field = "max_capacity"

    @property
    def needs(self) -> Needs:
        return Needs.ROPE if self.rerotate else Needs.NOTHING

    def acts_on(self, length: int) -> bool:
        return length > self.max_capacity

    def compress(self, call: AttentionCall) -> Eviction:
        n, n_sink, keys = self.max_capacity, self.n_sink, call.keys
        rotates, sinks = self.rerotate and n_sink > 0, call.carried.get(SINKS)
        if sinks is not None and sinks.shape[2] != n_sink * rotates:
            raise UnsupportedInputError(
                f"sinks of this cache were rotated: keep rerotate=True and n_sink={sinks.shape[2]}"
            )
        if rotates and sinks is None:  # NaN until the row is pruned for the first time
            precise = torch.promote_types(keys.dtype, torch.float32)
            sinks = torch.full_like(keys[:, :, :n_sink], torch.nan, dtype=precise)
        if call.length <= n:
            return replace(Eviction.nothing(call), carried={} if sinks is None else {SINKS: sinks})
        eviction = sinks_and_recent(call, n_sink, n - n_sink)
        return eviction if sinks is None else self.rerotated(eviction, sinks)

    def rerotated(self, eviction: Eviction, sinks: Tensor) -> Eviction:
        """The eviction with the sinks rotated to the positions right before the window.

        Args:
            sinks: `(B, H_kv, n_sink, d)`, their keys before RoPE; NaN for rows not yet pruned.
        """
        call, n_sink = eviction.call, self.n_sink
        rotary, positions = call.site.rotation, call.key_positions()
        # Rotated with the last key, whose position may set the frequencies of all (LongRoPE).
        ends, last = call.keys[:, :, [*range(n_sink), -1]], positions[..., -1:]
        at = torch.cat((positions[..., :n_sink].clamp(min=0), last), dim=-1)
        fresh = rotary.rotate_from(ends, at)
        sinks = torch.where(sinks.isnan(), fresh[:, :, :n_sink], sinks)
        begin = (last + 1 - self.max_capacity).clamp(min=0)
        targets = torch.cat((begin + torch.arange(n_sink, device=sinks.device), last), dim=-1)
        rotated = rotary.rotate_to(torch.cat((sinks, fresh[:, :, n_sink:]), dim=2), targets)
        rotated = rotated[:, :, :n_sink].to(eviction.keys.dtype)
        keys = torch.cat((rotated, eviction.keys[:, :, n_sink:]), dim=2)
        return replace(eviction, keys=keys, carried={SINKS: sinks})


@dataclass
class SimLayerKV(MeasuredPress):
    """Keeps only initial and recent tokens in lazy layers, everything in others (2410.13846).

    A layer is lazy if the last queries put more than `lazy_threshold` of their attention on initial
    and recent tokens, mean over heads. This is decided separately for each row of a batch. Contexts
    of at most `n_initial + n_recent + n_last` tokens are not pruned.

    Attributes:
        lazy_threshold: share of the attention, in [0, 1], above which a layer is lazy.
        n_last: number of last tokens whose queries are measured.
        n_recent: number of recent tokens before the last `n_last`; above `n_last`. A lazy layer
            keeps its last `n_recent - n_last` tokens.
        n_initial: number of first tokens.
    """

    lazy_threshold: float = share(1.0)
    n_last: int = count(1, 1)
    n_recent: int = above("n_last", 1024)
    n_initial: int = count(4)

    needs = Needs.QUERIES
    row_by_row = True
    whole_up_to = "n_initial", "n_recent", "n_last"

    def acts_on(self, length: int) -> bool:
        return self.is_long_enough(length) and self.lazy_threshold < 1

    def compress(self, call: AttentionCall) -> Eviction:
        if not self.acts_on(call.length) or self.laziness(call) <= self.lazy_threshold:
            return Eviction.nothing(call)
        return sinks_and_recent(call, self.n_initial, self.n_recent - self.n_last)

    def laziness(self, call: AttentionCall) -> float:
        """Attention of the last queries on initial and recent tokens, mean over rows and heads."""
        end = call.length - self.n_last
        weights = mean_attention(call, call.queries(self.n_last))[..., :end].mean(dim=(0, 1))
        return float(weights[: self.n_initial].sum() + weights[end - self.n_recent :].sum())
