"""Presses that give every cached token a score and keep the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hooks_impl.base import BasePress, observed
from press_core.scope import Compression
from press_core.select import n_kept, top_positions


@dataclass
class ScorerPress(Compression, BasePress):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens."""

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Scores `(B, H_kv, S)`, the higher the better, from the arguments of `compress`."""
        raise NotImplementedError

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        length = keys.shape[2]
        if self.compression_ratio == 0 or not self.acts_on(length):
            return keys, values
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        positions = top_positions(scores, n_kept(length, self.compression_ratio))
        return observed(kwargs).keep(positions)
