"""Presses that read keys and values alone: Knorm, KeyDiff and LagKV."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from press_core.call import AttentionCall
from press_core.fields import count
from press_core.scoring import RatioScorer
from press_core.select import leading, protect, upcast, with_ends
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


@dataclass
class KeyDiff(RatioScorer):
    """Keeps the keys that point away from the mean direction (Park et al., arXiv 2504.15364)."""

    def score(self, call: AttentionCall) -> Tensor:
        """Negative cosine between each key and the mean of the unit keys."""
        keys = upcast(call.keys)
        inverse = keys.norm(dim=-1).clamp(min=torch.finfo(keys.dtype).tiny).reciprocal()
        anchor = normalize(inverse.unsqueeze(2) @ keys, dim=-1)  # (B, H_kv, 1, d)
        return -(keys @ anchor.mT).squeeze(-1) * inverse


@dataclass
class LagKV(RatioScorer):
    """Keeps the tokens of each block that vary most against the next (arXiv 2504.04704).

    Contexts shorter than `n_sink + 2 * lag_size` keep their sinks and most recent tokens.

    Attributes:
        n_sink: first tokens, always kept.
        lag_size: tokens per block; the last full block and the rest after it are always kept.
        cross_scoring: compare scores across blocks, rather than ranks within each.
    """

    n_sink: int = count(4)
    lag_size: int = count(128, 1)
    cross_scoring: bool = False

    def score(self, call: AttentionCall) -> Tensor:
        """How much keys and values of a block vary by the range of the next one, in [0, 1]."""
        keys, n_sink, lag = call.keys, self.n_sink, self.lag_size
        n_blocks = (call.length - n_sink) // lag
        if n_blocks < 2:
            recency = torch.arange(call.length, device=keys.device, dtype=torch.float32)
            return protect((recency / call.length).expand(keys.shape[:3]), leading(keys, n_sink))
        end = n_sink + n_blocks * lag
        states = (upcast(x[:, :, n_sink:end]) for x in (keys, call.values))
        of_keys, of_values = (_variation(x.unflatten(2, (n_blocks, lag))) for x in states)
        scores = (of_keys + of_values) / 2  # (B, H_kv, n_blocks - 1, lag)
        if not self.cross_scoring:
            scores = scores.argsort(dim=-1).argsort(dim=-1) / lag
        return with_ends(scores.flatten(2), n_sink, call.length - end + lag)


def _variation(blocks: Tensor) -> Tensor:
    """`(B, H_kv, n_blocks, lag, d)` to `(B, H_kv, n_blocks - 1, lag)`."""
    judged, reference = blocks[:, :, :-1], blocks[:, :, 1:]
    low, high = reference.amin(dim=-2, keepdim=True), reference.amax(dim=-2, keepdim=True)
    spread = torch.where(high > low, high - low, 1)  # a constant channel has no range to divide by
    scaled = (judged - low).div_(spread)
    # The standard deviation, which torch's own takes ten times as long for.
    centred = scaled.sub_(scaled.mean(dim=-1, keepdim=True))
    deviation = centred.norm(dim=-1) / (scaled.shape[-1] - 1) ** 0.5
    return deviation.softmax(dim=-1)
