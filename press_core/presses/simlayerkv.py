"""SimLayerKV (Zhang et al., arXiv 2410.13846): lazy layers keep little."""

from __future__ import annotations

from dataclasses import dataclass

from press_core.attention import mean_attention
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import count, require, share
from press_core.press import MeasuredPress
from press_core.select import leading, trailing
from press_core.traits import Needs


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

    lazy_threshold: float = share(1.0)
    n_last: int = count(1, 1)
    n_recent: int = 1024
    n_initial: int = count(4)

    needs = Needs.QUERIES
    row_by_row = True

    def validate(self) -> None:
        super().validate()
        fits = self.n_recent > self.n_last
        require(self, "n_recent", fits, f"a number of tokens above n_last={self.n_last}")

    def is_long_enough(self, length: int) -> bool:
        return length > self.n_initial + self.n_recent + self.n_last

    def compress(self, call: AttentionCall) -> Eviction:
        if not self.is_long_enough(call.length) or self.laziness(call) <= self.lazy_threshold:
            return Eviction.nothing(call)
        recent = trailing(call.keys, self.n_recent - self.n_last)
        kept = (leading(call.keys, self.n_initial) | recent).nonzero().squeeze(1)
        return Eviction.keep(call, kept.expand(*call.keys.shape[:2], -1))

    def laziness(self, call: AttentionCall) -> float:
        """Attention of the last queries on initial and recent tokens, mean over rows and heads."""
        end = call.length - self.n_last
        weights = mean_attention(call, call.queries(self.n_last))[..., :end].mean(dim=(0, 1))
        recent = max(self.n_initial, end - self.n_recent)
        return float(weights[: self.n_initial].sum() + weights[recent:].sum())
