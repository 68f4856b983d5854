"""ThinK (Xu et al., arXiv 2407.21018): fewer channels of the keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import count, limited
from press_core.press import Press
from press_core.select import best_first, places, upcast
from press_core.traits import Evicts, Needs


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
    def asked_ratio(self) -> float:
        return self.key_channel_compression_ratio / 2  # values keep all channels

    @property
    def compression_ratio(self) -> float:
        """Share of the cache that is dropped."""
        return self.asked_ratio

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
            return Eviction.keep_channels(call, places(kept))
        keys = call.keys * kept.to(call.keys.dtype).unsqueeze(2)
        return Eviction.from_states(call, keys, call.values)

    def channel_scores(self, call: AttentionCall) -> Tensor:
        """Mean square of the last queries, times the mean square of the keys: `(B, H_kv, d)`."""
        queries = upcast(call.queries(self.window_size)).square().mean(dim=2)  # (B, H, d)
        per_group = queries.unflatten(1, (call.keys.shape[1], -1)).mean(dim=2)
        return per_group * upcast(call.keys).square().mean(dim=2)
