"""StreamingLLM (Xiao et al., arXiv 2309.17453): attention sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import count, require
from press_core.press import MeasuredPress, Press
from press_core.scoring import RatioScorer
from press_core.select import leading, trailing
from press_core.traits import Needs, Phase

SINKS = "sinks before RoPE"


@dataclass
class StreamingLLM(RatioScorer):
    """Keeps the first `n_sink` tokens and the most recent ones (Xiao et al., arXiv 2309.17453).

    Contexts of at most `n_sink` tokens are left whole.

    Attributes:
        n_sink: tokens at the start that are always kept.
    """

    n_sink: int = count(4)

    needs = Needs.POSITIONS_ALONE | Needs.SAME_FOR_ALL_HEADS

    def is_long_enough(self, length: int) -> bool:
        return length > self.n_sink

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

    max_capacity: int = 256
    n_sink: int = count(4)
    rerotate: bool = False

    phases = Phase.BEFORE_DECODING

    def validate(self) -> None:
        super().validate()
        fits = self.max_capacity > self.n_sink
        require(self, "max_capacity", fits, f"a number of tokens above n_sink={self.n_sink}")

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
        kept = (leading(keys, n_sink) | trailing(keys, n - n_sink)).nonzero().squeeze(1)
        eviction = Eviction.keep(call, kept.expand(*keys.shape[:2], -1))
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
