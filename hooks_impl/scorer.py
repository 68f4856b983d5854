"""Presses that give every cached token a score and keep the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hooks_impl.base import BasePress, observed
from press_core.scope import Compression
from press_core.select import top_positions


@dataclass
class Scorer(BasePress):
    """Keeps, per KV head, as many of the best-scored tokens as its `budget` says."""

    scores_tokens = True

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
        call = observed(kwargs)
        n = self.budget(call)
        if n >= call.length or not self.acts_on(call.length):
            return keys, values
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        return call.keep(top_positions(scores, n))


@dataclass
class ScorerPress(Compression, Scorer):
    """Keeps, per KV head, the `n = max(1, int(S * (1 - compression_ratio)))` best-scored tokens."""
