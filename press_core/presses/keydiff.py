"""KeyDiff (Park et al., arXiv 2504.15364): keys unlike the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from press_core.call import AttentionCall
from press_core.press import RatioScorer
from press_core.select import upcast


@dataclass
class KeyDiff(RatioScorer):
    """Keeps the keys that point away from the mean direction (Park et al., arXiv 2504.15364)."""

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return keydiff_scores(call.keys)


def keydiff_scores(keys: Tensor) -> Tensor:
    """Negative cosine between each key and the mean of the unit keys.

    Args:
        keys: `(B, H_kv, S, d)`.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    keys = upcast(keys)
    inverse = keys.norm(dim=-1).clamp(min=torch.finfo(keys.dtype).tiny).reciprocal()
    anchor = normalize(inverse.unsqueeze(2) @ keys, dim=-1)  # (B, H_kv, 1, d)
    return -(keys @ anchor.mT).squeeze(-1) * inverse
