"""Random eviction, the baseline that any method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.press import RatioScorer, require


@dataclass
class Random(RatioScorer):
    """Evicts tokens at random.

    Attributes:
        seed: numbers come from `(seed, layer_idx)` and are equal on every device, for every row of
            a batch and with both mechanisms. None: from torch's global generator.
    """

    seed: int | None = None

    reads_states = False
    independent = True

    def validate(self) -> None:
        super().validate()
        check_seed(self)

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return random_scores(call.keys, self.seed, call.site.layer_idx)


_LAYERS = 2**16
"""More layers than any model has, so that no two (seed, layer) pairs share a generator's seed."""


def check_seed(press: Any) -> None:
    """Validate the field `seed`."""
    fits = press.seed is None or 0 <= press.seed < 2**32
    require(press, "seed", fits, "None or a whole number in [0, 2**32)")


def layer_generator(seed: int, layer_idx: int) -> torch.Generator:
    """The CPU generator of one seed and layer."""
    return torch.Generator().manual_seed(seed * _LAYERS + layer_idx)


def random_scores(keys: Tensor, seed: int | None, layer_idx: int) -> Tensor:
    """Uniform scores in [0, 1).

    Args:
        keys: `(B, H_kv, S, d)`.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    batch, n_kv, length, _ = keys.shape
    generator = None
    if seed is not None:
        generator = layer_generator(seed, layer_idx)
    scores = torch.rand(1, n_kv, length, generator=generator, dtype=torch.float32)
    return scores.to(keys.device).expand(batch, -1, -1)
