"""StreamingLLM for endless generation (Xiao et al., arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.errors import UnsupportedCacheError
from press_core.forward import Forward
from press_core.layers import is_quantized
from press_core.scope import Press, latest_run, require
from press_core.steps import prune_before, row_lengths


@dataclass
class StreamingLLMDecoding(Press):
    """Bounds the cache for endless generation: sinks and a rolling window (arXiv 2309.17453).

    Before each attention forward, a layer longer than `max_capacity` keeps its first `n_sink` and
    its last `max_capacity - n_sink` tokens.

    Attributes:
        max_capacity: tokens that a layer holds at most when a forward begins.
        n_sink: first tokens, always kept.
        rerotate: let tokens have the positions that they have in the cache, as the paper does. Only
            distances count under RoPE, and those between recent tokens stay: so the sinks are
            turned, each time from the keys that they had, and errors do not add up.
    """

    max_capacity: int = 256
    n_sink: int = 4
    rerotate: bool = False

    acts_in_prefill = False

    def validate(self) -> None:
        super().validate()
        require(self, "n_sink", self.n_sink >= 0, "a number of tokens, 0 or more")
        fits = self.max_capacity > self.n_sink
        require(self, "max_capacity", fits, f"a number of tokens above n_sink={self.n_sink}")

    @property
    def uses_rope(self) -> bool:  # type: ignore[override]
        return self.rerotate

    @property
    def n_compressions(self) -> int:
        """How often each layer was cut (the most of all layers) in the scope opened last."""
        return max(latest_run(self).n_compressions.values(), default=0)

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted in the scope opened last."""
        return latest_run(self).compression_ratio

    def before(self, forward: Forward) -> None:
        held = row_lengths(forward)
        if int(held.max()) <= self.max_capacity:
            return
        former = forward.layer
        prune_before(forward, self.cut)
        if self.rerotate and self.n_sink:
            self.turn_sinks(forward, former, held)

    def turn_sinks(self, forward: Forward, former: Any, held: Tensor) -> None:
        """Turn the sinks of rows that were cut to where they touch the window.

        Args:
            former: the layer before it was cut.
            held: `(B,)`, how many tokens each row held then.
        """
        layer, rotary, n_sink = forward.layer, forward.site.rotary, self.n_sink
        if is_quantized(layer):
            raise UnsupportedCacheError(
                "StreamingLLMDecodingPress(rerotate=True) turns cached keys, and a quantized layer "
                "would lose more of them each time; use a DynamicCache"
            )
        assert rotary is not None
        keys, places = layer.keys[:, :, :n_sink], torch.arange(n_sink, device=held.device)
        next_position = forward.first_position.to(held.device).expand(len(held))
        cut = held > self.max_capacity
        known = getattr(former, "sinks_known", None)
        known = torch.zeros_like(cut) if known is None else known
        first_cut = cut & ~known
        layer.sinks, layer.sinks_known = getattr(former, "sinks", None), known | cut
        if bool(first_cut.any()):
            began = (next_position - held).clamp(min=0)[:, None] + places
            fresh = rotary.turn(keys, began.unsqueeze(1), back=True)
            before = fresh if layer.sinks is None else layer.sinks
            layer.sinks = torch.where(first_cut.view(-1, 1, 1, 1), fresh, before)
        begin = (next_position - self.max_capacity).clamp(min=0)[:, None] + places
        turned = rotary.turn(layer.sinks, begin.unsqueeze(1)).to(keys.dtype)
        turned = torch.where(cut.view(-1, 1, 1, 1), turned, keys)
        layer.keys = torch.cat((turned, layer.keys[:, :, n_sink:]), dim=2)

    def cut(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Keep the sinks and the window of `call`."""
        n = self.max_capacity
        if call.length <= n:
            return call.keys, call.values
        tokens = torch.arange(call.length, device=call.keys.device)
        kept = tokens[(tokens < self.n_sink) | (tokens >= call.length - n + self.n_sink)]
        return call.keep(kept.expand(*call.keys.shape[:2], -1))
