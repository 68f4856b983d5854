"""Key norm (Devoto et al., arXiv 2406.11430): keys of small norm attract attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from press_core.scope import Compression
from press_core.select import upcast


@dataclass
class Knorm(Compression):
    """Keeps the keys of smallest L2 norm (Devoto et al., arXiv 2406.11430)."""

    scores_alone = True


def knorm_scores(keys: Tensor) -> Tensor:
    """Negative L2 norm of each key: `(B, H_kv, S, d)` to `(B, H_kv, S)`."""
    return -upcast(keys).norm(dim=-1)
