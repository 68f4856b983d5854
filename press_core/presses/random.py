"""Random eviction, the baseline that any method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.fields import limited
from press_core.scoring import RatioScorer
from press_core.traits import Needs


def seed_field() -> Any:
    """A field for the seed of a generator, or None."""
    allowed = "None or a whole number in [0, 2**32)"
    return limited(None, lambda seed: seed is None or 0 <= seed < 2**32, allowed)


@dataclass
class Random(RatioScorer):
    """Evicts tokens at random.

    Attributes:
        seed: numbers come from `(seed, layer_idx)` and are equal on every device, for every row of
            a batch and with both mechanisms. None: from torch's global generator.
    """

    seed: int | None = seed_field()

    needs = Needs.POSITIONS_ALONE
    independent = True

    def score(self, call: AttentionCall) -> Tensor:
        batch, n_kv, length, _ = call.keys.shape
        generator = layer_generator(self.seed, call.site.layer_idx)
        scores = torch.rand(1, n_kv, length, generator=generator, dtype=torch.float32)
        return scores.to(call.keys.device).expand(batch, -1, -1)


_LAYERS = 2**16
"""More layers than any model has, so that no two (seed, layer) pairs share a generator's seed."""


def layer_generator(seed: int | None, layer_idx: int) -> torch.Generator | None:
    """The CPU generator of one seed and layer; None, for torch's global one, without a seed."""
    return None if seed is None else torch.Generator().manual_seed(seed * _LAYERS + layer_idx)
