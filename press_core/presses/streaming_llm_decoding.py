"""StreamingLLM for endless generation (Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from press_core.cache.pruned import PrunedLayer, Sinks, is_quantized
from press_core.call import AttentionCall
from press_core.engine import prune_before, row_lengths
from press_core.errors import UnsupportedCacheError
from press_core.eviction import Eviction
from press_core.model.forward import AttentionForward
from press_core.model.rotary import Rotary
from press_core.press import MeasuredPress, Needs, Phase, Press, require
from press_core.scope import ScopeState


@dataclass
class StreamingLLMDecoding(MeasuredPress):
    """Bounds the cache for endless generation: sinks and a rolling window (arXiv 2309.17453).

    Before each attention forward, a layer longer than `max_capacity` keeps its first `n_sink` and
    its last `max_capacity - n_sink` tokens.

    Attributes:
        max_capacity: tokens that a layer holds at most when a forward begins.
        n_sink: first tokens, always kept.
        rerotate: let tokens have the positions that they have in the cache, as the paper does. Only
            distances count under RoPE, and those between recent tokens stay: so the sinks are
            rotated, each time from the keys that they had, and errors do not add up.
    """

    max_capacity: int = 256
    n_sink: int = 4
    rerotate: bool = False

    phases = Phase.BEFORE_DECODING

    def validate(self) -> None:
        super().validate()
        require(self, "n_sink", self.n_sink >= 0, "a number of tokens, 0 or more")
        fits = self.max_capacity > self.n_sink
        require(self, "max_capacity", fits, f"a number of tokens above n_sink={self.n_sink}")

    def with_budget(self, tokens: int) -> Press:
        return replace(self, max_capacity=tokens)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs.ROPE if self.rerotate else Needs.NOTHING

    def before_attention(self, scope: ScopeState, forward: AttentionForward) -> None:
        held = row_lengths(forward)
        if int(held.max()) <= self.max_capacity:
            return
        former = forward.layer
        prune_before(scope, forward)
        if self.rerotate and self.n_sink:
            self.rerotate_sinks(forward, former, held)

    def rerotate_sinks(self, forward: AttentionForward, former: Any, held: Tensor) -> None:
        """Rotate the sinks of rows that were cut to where they touch the window.

        Args:
            former: the layer before it was cut.
            held: `(B,)`, how many tokens each row held then.
        """
        layer, rotary, n_sink = forward.layer, forward.site.rotary, self.n_sink
        if is_quantized(layer):
            raise UnsupportedCacheError(
                "StreamingLLMDecodingPress(rerotate=True) rotates cached keys, and a quantized "
                "layer would lose more of them each time; use a DynamicCache"
            )
        assert rotary is not None
        keys, places = layer.keys[:, :, :n_sink], torch.arange(n_sink, device=held.device)
        next_position = forward.first_position.to(held.device).expand(len(held))
        cut = held > self.max_capacity
        began = (next_position - held).clamp(min=0)[:, None] + places
        sinks = _sinks_before_rope(former, keys, cut, rotary, began)
        begin = (next_position - self.max_capacity).clamp(min=0)[:, None] + places
        rotated = rotary.rotate_to(sinks.keys, begin.unsqueeze(1)).to(keys.dtype)
        rotated = torch.where(cut.view(-1, 1, 1, 1), rotated, keys)
        layer.keys = torch.cat((rotated, layer.keys[:, :, n_sink:]), dim=2)
        layer.sinks = sinks

    def decide(self, call: AttentionCall) -> Eviction:
        n = self.max_capacity
        if call.length <= n:
            return Eviction.nothing(call)
        tokens = torch.arange(call.length, device=call.keys.device)
        kept = tokens[(tokens < self.n_sink) | (tokens >= call.length - n + self.n_sink)]
        return Eviction.keep(call, kept.expand(*call.keys.shape[:2], -1))


def _sinks_before_rope(
    former: Any, keys: Tensor, cut: Tensor, rotary: Rotary, began: Tensor
) -> Sinks:
    """The first keys of each row before RoPE: those known already, and of rows cut first now.

    Args:
        keys: `(B, H_kv, n_sink, d)`, as they lie in the cache.
        cut: `(B,)` bool, rows that are cut now.
        began: `(B, n_sink)` int64, to which positions keys of rows are rotated that were never cut.
    """
    before = former.sinks if isinstance(former, PrunedLayer) else None
    known = torch.zeros_like(cut) if before is None else before.known
    first_cut = cut & ~known
    if before is not None and not bool(first_cut.any()):
        return before
    fresh = rotary.rotate_from(keys, began.unsqueeze(1))
    if before is not None:
        fresh = torch.where(first_cut.view(-1, 1, 1, 1), fresh, before.keys)
    return Sinks(fresh, known | cut)
