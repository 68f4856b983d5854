"""SimLayerKV (Zhang et al., arXiv 2410.13846): lazy layers keep little."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from press_core.attention import mean_attention
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.press import MeasuredPress, Needs, require


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

    lazy_threshold: float = 1.0
    n_last: int = 1
    n_recent: int = 1024
    n_initial: int = 4

    needs = Needs.QUERIES
    row_by_row = True

    def validate(self) -> None:
        super().validate()
        threshold = self.lazy_threshold
        require(self, "lazy_threshold", 0 <= threshold <= 1, "a number in [0, 1]")
        require(self, "n_last", self.n_last >= 1, "a number of tokens, 1 or more")
        fits = self.n_recent > self.n_last
        require(self, "n_recent", fits, f"a number of tokens above n_last={self.n_last}")
        require(self, "n_initial", self.n_initial >= 0, "a number of tokens, 0 or more")

    def is_long_enough(self, length: int) -> bool:
        return length > self.n_initial + self.n_recent + self.n_last

    def decide(self, call: AttentionCall) -> Eviction:
        if not self.is_long_enough(call.length) or laziness(call, self) <= self.lazy_threshold:
            return Eviction.nothing(call)
        tokens = torch.arange(call.length, device=call.keys.device)
        recent = call.length - self.n_recent + self.n_last
        kept = tokens[(tokens < self.n_initial) | (tokens >= recent)]
        return Eviction.keep(call, kept.expand(*call.keys.shape[:2], -1))


def laziness(call: AttentionCall, press: SimLayerKV) -> float:
    """Attention of the last queries on initial and recent tokens, mean over rows and heads."""
    end = call.length - press.n_last
    weights = mean_attention(call, call.queries(press.n_last))[..., :end].mean(dim=(0, 1))
    recent = max(press.n_initial, end - press.n_recent)
    return float(weights[: press.n_initial].sum() + weights[recent:].sum())
