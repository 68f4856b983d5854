"""Leverage scores, one half of Compactor (Chari and Van Durme, arXiv 2507.08143)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.press import RatioScorer, require
from press_core.select import upcast


@dataclass
class LeverageScore(RatioScorer):
    """Keeps the keys that the others cannot make up (Chari and Van Durme, arXiv 2507.08143).

    The sketch is the same in every run, on every device and for every row of a batch: it depends on
    the layer alone.

    Attributes:
        sketch_dimension: channels that a Gaussian sketch leaves of each key.
    """

    sketch_dimension: int = 48

    def validate(self) -> None:
        super().validate()
        require(self, "sketch_dimension", self.sketch_dimension >= 1, "1 or more")

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return leverage_scores(call.keys_before_rope(), self.sketch_dimension, call.site.layer_idx)


_RIDGE = 1e-2
"""Added to the eigenvalues of the Gram matrix; that of kvpress."""


def leverage_scores(keys: Tensor, sketch_dimension: int, layer_idx: int) -> Tensor:
    """Leverage of each key in the sketched, centred keys of its head, standardised.

    Args:
        keys: `(B, H_kv, S, d)`, before RoPE.

    Returns:
        `(B, H_kv, S)`, float32.
    """
    keys = upcast(keys)
    projection = sketch((keys.shape[1], keys.shape[3], sketch_dimension), layer_idx, keys)
    sketched = keys @ (projection / sketch_dimension**0.5)
    sketched -= sketched.mean(dim=2, keepdim=True)  # of fewer channels than the keys have
    del keys  # as large as a layer
    gram = sketched.mT @ sketched  # (B, H_kv, s, s)
    identity = torch.eye(sketch_dimension, device=gram.device, dtype=gram.dtype)
    factor, failed = torch.linalg.cholesky_ex(gram + _RIDGE * identity)
    if failed.any():
        # Large keys of low rank: the ridge is lost in the rounding of the Gram matrix, which is
        # a share of its trace.
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        more = (failed > 0) * 64 * torch.finfo(gram.dtype).eps * trace
        factor, _ = torch.linalg.cholesky_ex(gram + (_RIDGE + more)[..., None, None] * identity)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    return standardised((sketched @ inverse.mT).square_().sum(dim=-1))


def sketch(shape: tuple[int, ...], layer_idx: int, like: Tensor) -> Tensor:
    """Standard normal numbers that depend on the layer alone, with device and dtype of `like`."""
    generator = torch.Generator().manual_seed(layer_idx)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(like)


def standardised(scores: Tensor) -> Tensor:
    """Scores `(B, H_kv, S)` with mean 0 and standard deviation 1 over each row of the batch.

    All heads of a row are taken together, so that they still compare.
    """
    centred = scores - scores.mean(dim=(1, 2), keepdim=True)
    degrees = max(1, scores[0].numel() - 1)
    variance = centred.square().sum(dim=(1, 2), keepdim=True) / degrees
    return centred / variance.sqrt().clamp(min=1e-6)
