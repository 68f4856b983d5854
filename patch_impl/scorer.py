"""Presses that give every cached token a score and keep the best."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.scope import Compression
from press_core.select import top_positions


@dataclass
class Scorer(BasePress):
    """Keeps, per KV head, as many of the best-scored tokens as its `budget` says."""

    scores_tokens = True

    def score(self, call: AttentionCall) -> Tensor:
        """Scores `(B, H_kv, S)`, the higher the better."""
        raise NotImplementedError

    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        n = self.budget(call)
        if n >= call.length or not self.acts_on(call.length):
            return call.keys, call.values
        return call.keep(top_positions(self.score(call), n))


@dataclass
class ScorerPress(Compression, Scorer):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens."""
