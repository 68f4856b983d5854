"""Key norm (Devoto et al., arXiv 2406.11430): keys of small norm attract attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.press import RatioScorer
from press_core.select import upcast


@dataclass
class Knorm(RatioScorer):
    """Keeps the keys of smallest L2 norm (Devoto et al., arXiv 2406.11430)."""

    independent = True
    compares_key_norms = True

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return knorm_scores(call.keys)


def knorm_scores(keys: Tensor) -> Tensor:
    """Negative L2 norm of each key: `(B, H_kv, S, d)` to `(B, H_kv, S)`."""
    return -torch.linalg.vector_norm(upcast(keys), dim=-1)
