"""Key norm (Devoto et al., arXiv 2406.11430): keys of small norm attract attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.scoring import RatioScorer
from press_core.select import upcast
from press_core.traits import Needs


@dataclass
class Knorm(RatioScorer):
    """Keeps the keys of smallest L2 norm (Devoto et al., arXiv 2406.11430)."""

    independent = True
    needs = Needs.KEY_NORMS

    def score(self, call: AttentionCall) -> Tensor:
        return knorm_scores(call.keys)


def knorm_scores(keys: Tensor) -> Tensor:
    """Negative L2 norm of each key: `(B, H_kv, S, d)` to `(B, H_kv, S)`."""
    return -torch.linalg.vector_norm(upcast(keys), dim=-1)
