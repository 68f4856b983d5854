"""PyramidKV (Cai et al., arXiv 2406.02069): lower layers keep more."""

from __future__ import annotations

from dataclasses import dataclass

from press_core.call import AttentionCall
from press_core.press import require
from press_core.presses.snapkv import SnapKV


@dataclass
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall from layer to layer (Cai et al., arXiv 2406.02069).

    Contexts of at most `window_size` tokens are left whole.

    Attributes:
        window_size: last tokens, whose queries vote and which are themselves always kept.
        kernel_size: width of the average pooling over neighbouring keys; odd.
        beta: how steeply budgets fall: the last layer keeps a `beta`-th of the mean.
    """

    beta: int = 20

    def validate(self) -> None:
        super().validate()
        require(self, "beta", self.beta >= 1, "1 or more")

    def budget(self, call: AttentionCall) -> int:
        ratio = self.ratio_of(call.length)
        if call.budget or ratio == 0:
            return super().budget(call)
        depth, n_layers = call.site.depth, call.site.n_sites
        mean = call.length * (1 - ratio)
        return pyramid_budget(call.length, mean, self.window_size, self.beta, depth, n_layers)


def pyramid_budget(
    length: int, mean: float, window_size: int, beta: float, depth: int, n_layers: int
) -> int:
    """How many of `length` tokens the layer at `depth` of `n_layers` keeps, `mean` on average."""
    low = mean / beta
    high = 2 * mean - low
    if high > length - window_size:
        high = length - window_size
        low = 2 * mean - high
    if not length >= high >= low >= window_size:
        return max(1, round(mean))
    if n_layers == 1:
        return round(high)
    return round(high - depth * (high - low) / (n_layers - 1))
