"""Presses that give every cached token a score and keep the best."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.scope import Compression
from press_core.select import n_kept, top_positions


@dataclass
class ScorerPress(Compression, BasePress):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens."""

    def score(self, call: AttentionCall) -> Tensor:
        """Scores `(B, H_kv, S)`, the higher the better."""
        raise NotImplementedError

    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        if self.compression_ratio == 0 or not self.acts_on(call.length):
            return call.keys, call.values
        positions = top_positions(self.score(call), n_kept(call.length, self.compression_ratio))
        return call.keep(positions)
