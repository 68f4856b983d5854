"""ThinK (Xu et al., arXiv 2407.21018): fewer channels of the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.press import Evicts, Needs, Press, require
from press_core.select import upcast


@dataclass
class ThinK(Press):
    """Drops the channels of the keys that the last queries need least (arXiv 2407.21018).

    Attributes:
        key_channel_compression_ratio: share of the channels that each KV head drops, in [0, 1).
        window_size: last tokens, whose queries decide.
        free_memory: store the kept channels only; attention then cuts queries to the same
            channels. By default dropped channels are set to zero, which saves nothing.
    """

    key_channel_compression_ratio: float = 0.0
    window_size: int = 32
    free_memory: bool = False

    needs = Needs.QUERIES

    def validate(self) -> None:
        super().validate()
        ratio = self.key_channel_compression_ratio
        require(self, "key_channel_compression_ratio", 0 <= ratio < 1, "a number in [0, 1)")
        require(self, "window_size", self.window_size >= 1, "a number of tokens, 1 or more")

    @property
    def compression_ratio(self) -> float:
        """Share of the cache that is dropped; values keep all channels."""
        return self.key_channel_compression_ratio / 2

    @property
    def evicts(self) -> Evicts:  # type: ignore[override]
        return Evicts.CHANNELS if self.free_memory else Evicts.NOTHING

    def decide(self, call: AttentionCall) -> Eviction:
        keys = call.keys
        n_dropped = int(keys.shape[-1] * self.key_channel_compression_ratio)
        if n_dropped == 0:
            return Eviction.nothing(call)
        scores = channel_scores(call, self.window_size)
        if self.free_memory:
            n_kept = keys.shape[-1] - n_dropped
            channels = scores.topk(n_kept, sorted=False).indices.sort(dim=-1).values
            return Eviction.keep_channels(call, channels)
        dropped = scores.topk(n_dropped, largest=False, sorted=False).indices
        kept = torch.ones_like(scores, dtype=keys.dtype).scatter_(-1, dropped, 0)
        return Eviction.from_states(call, keys * kept.unsqueeze(2), call.values)


def channel_scores(call: AttentionCall, window_size: int) -> Tensor:
    """Mean square of the last queries, times the mean square of the keys, per channel.

    Returns:
        `(B, H_kv, d)`, float32.
    """
    queries = upcast(call.queries(window_size)).square().mean(dim=2)  # (B, H, d)
    per_group = queries.unflatten(1, (call.keys.shape[1], -1)).mean(dim=2)
    return per_group * upcast(call.keys).square().mean(dim=2)
