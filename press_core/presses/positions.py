"""Presses that go by where tokens stand: at random, or attention sinks and a recent window.

SimLayerKV (Zhang et al., arXiv 2410.13846) keeps no more than these in lazy layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from press_core.attention import mean_attention
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import above, count, limited, share
from press_core.press import MeasuredPress, Press
from press_core.scoring import RatioScorer
from press_core.select import leading, trailing
from press_core.traits import Needs, Phase


def seed_field() -> Any:
    """A field for the seed of a generator, or None."""
    allowed = "None or a whole number in [0, 2**32)"
    return limited(None, lambda seed: seed is None or 0 <= seed < 2**32, allowed)


@dataclass
class Random(RatioScorer):
    """Evicts tokens at random.

    Attributes:
        seed: numbers come from `(seed, layer_idx)` and are equal on every device, for every row of
            a batch and with both mechanisms. None: from torch's global generator.
    """

    seed: int | None = seed_field()

    needs = Needs.POSITIONS_ALONE
    independent = True

    def score(self, call: AttentionCall) -> Tensor:
        batch, n_kv, length, _ = call.keys.shape
        generator = layer_generator(self.seed, call.site.layer_idx)
        scores = torch.rand(1, n_kv, length, generator=generator, dtype=torch.float32)
        return scores.to(call.keys.device).expand(batch, -1, -1)


_LAYERS = 2**16
"""More layers than any model has, so that no two (seed, layer) pairs share a generator's seed."""


def layer_generator(seed: int | None, layer_idx: int) -> torch.Generator | None:
    """The CPU generator of one seed and layer; None, for torch's global one, without a seed."""
    return None if seed is None else torch.Generator().manual_seed(seed * _LAYERS + layer_idx)


SINKS = "sinks before RoPE"


def sinks_and_recent(call: AttentionCall, n_first: int, n_last: int) -> Eviction:
    """The first and the last tokens of every head stay."""
    kept = (leading(call.keys, n_first) | trailing(call.keys, n_last)).nonzero().squeeze(1)
    return Eviction.keep(call, kept.expand(*call.keys.shape[:2], -1))


@dataclass
class StreamingLLM(RatioScorer):
    """Keeps the first `n_sink` tokens and the most recent ones (Xiao et al., arXiv 2309.17453).

    Contexts of at most `n_sink` tokens are left whole.

    Attributes:
        n_sink: tokens at the start that are always kept.
    """

    n_sink: int = count(4)

    needs = Needs.POSITIONS_ALONE | Needs.SAME_FOR_ALL_HEADS
    whole_up_to = ("n_sink",)

    def score(self, call: AttentionCall) -> Tensor:
        """1 for the sinks and for the recent tokens that the budget leaves room for, 0 between."""
        n_sinks = min(self.n_sink, self.budget(call))
        kept = leading(call.keys, n_sinks) | trailing(call.keys, self.budget(call) - n_sinks)
        return kept.float().expand(call.keys.shape[:3])


@dataclass
class StreamingLLMDecoding(MeasuredPress):
    """Bounds the cache for endless generation: sinks and a rolling window (arXiv 2309.17453).

    Before each forward, a layer longer than `max_capacity` keeps its first `n_sink` and its last
    `max_capacity - n_sink` tokens. What is generated depends on how a context was brought: in
    chunks, later ones do not see what was evicted before them.

    Attributes:
        max_capacity: tokens that a layer holds at most when a forward begins.
        n_sink: first tokens, always kept.
        rerotate: let tokens have the positions that they have in the cache, as the paper does. Only
            distances count under RoPE, and those between recent tokens stay: so the sinks are
            rotated, each time from the keys that they had, and errors do not add up.
    """

    max_capacity: int = above("n_sink", 256)
    n_sink: int = count(4)
    rerotate: bool = False

    phases = Phase.BEFORE_DECODING

    def with_budget(self, tokens: int) -> Press:
        return self.changed(max_capacity=tokens)

    @property
    def needs(self) -> Needs:
        return Needs.ROPE if self.rerotate else Needs.NOTHING

    def keeps(self, length: int) -> int:
        return min(length, self.max_capacity)

    def compress(self, call: AttentionCall) -> Eviction:
        n, n_sink, keys = self.max_capacity, self.n_sink, call.keys
        turns, sinks = self.rerotate and n_sink > 0, call.carried.get(SINKS)
        if turns and sinks is None:  # not known before rows are cut
            precise = torch.promote_types(keys.dtype, torch.float32)
            sinks = torch.full_like(keys[:, :, :n_sink], torch.nan, dtype=precise)
        if call.length <= n:
            carried = {} if sinks is None else {SINKS: sinks}
            return replace(Eviction.nothing(call), carried=carried)
        eviction = sinks_and_recent(call, n_sink, n - n_sink)
        return eviction if sinks is None else self.rerotated(eviction, sinks)

    def rerotated(self, eviction: Eviction, sinks: Tensor) -> Eviction:
        """The eviction with the sinks rotated to where they touch the window.

        Args:
            sinks: `(B, H_kv, n_sink, d)`, their keys before RoPE; NaN of rows that were never cut.
        """
        call, n_sink = eviction.call, self.n_sink
        rotary, positions = call.site.rotary, call.key_positions()
        assert rotary is not None
        fresh = rotary.rotate_from(call.keys[:, :, :n_sink], positions[..., :n_sink].clamp(min=0))
        sinks = torch.where(sinks.isnan(), fresh, sinks)
        begin = (positions[..., -1:] + 1 - self.max_capacity).clamp(min=0)
        places = begin + torch.arange(n_sink, device=sinks.device)
        rotated = rotary.rotate_to(sinks, places).to(eviction.keys.dtype)
        keys = torch.cat((rotated, eviction.keys[:, :, n_sink:]), dim=2)
        return replace(eviction, keys=keys, carried={SINKS: sinks})


@dataclass
class SimLayerKV(MeasuredPress):
    """Keeps initial and recent tokens only, in layers that look at little else (2410.13846).

    Contexts of at most `n_initial + n_recent + n_last` tokens are left whole. Each row of a batch
    is judged by itself.

    Attributes:
        lazy_threshold: attention on initial and recent tokens above which a layer is lazy.
        n_last: last tokens, whose queries are asked.
        n_recent: recent tokens, those asked included.
        n_initial: first tokens.
    """

    lazy_threshold: float = share(1.0)
    n_last: int = count(1, 1)
    n_recent: int = above("n_last", 1024)
    n_initial: int = count(4)

    needs = Needs.QUERIES
    row_by_row = True
    whole_up_to = "n_initial", "n_recent", "n_last"

    def compress(self, call: AttentionCall) -> Eviction:
        if not self.is_long_enough(call.length) or self.laziness(call) <= self.lazy_threshold:
            return Eviction.nothing(call)
        return sinks_and_recent(call, self.n_initial, self.n_recent - self.n_last)

    def laziness(self, call: AttentionCall) -> float:
        """Attention of the last queries on initial and recent tokens, mean over rows and heads."""
        end = call.length - self.n_last
        weights = mean_attention(call, call.queries(self.n_last))[..., :end].mean(dim=(0, 1))
        return float(weights[: self.n_initial].sum() + weights[end - self.n_recent :].sum())
