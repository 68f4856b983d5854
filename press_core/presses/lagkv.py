"""LagKV (Liang et al., arXiv 2504.04704): tokens that differ from what comes a block later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.call import AttentionCall
from press_core.press import RatioScorer, require
from press_core.select import leading, protect, trailing, upcast


@dataclass
class LagKV(RatioScorer):
    """Keeps the tokens of each block that vary most against the next (arXiv 2504.04704).

    Contexts shorter than `n_sink + 2 * lag_size` keep their sinks and most recent tokens.

    Attributes:
        n_sink: first tokens, always kept.
        lag_size: tokens per block; the last full block and the rest after it are always kept.
        cross_scoring: compare scores across blocks, rather than ranks within each.
    """

    n_sink: int = 4
    lag_size: int = 128
    cross_scoring: bool = False

    def validate(self) -> None:
        super().validate()
        require(self, "n_sink", self.n_sink >= 0, "a number of tokens, 0 or more")
        require(self, "lag_size", self.lag_size >= 1, "a number of tokens, 1 or more")

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return lagkv_scores(call.keys, call.values, self)


def lagkv_scores(keys: Tensor, values: Tensor, press: LagKV) -> Tensor:
    """Per-block variation of keys and values, normalised by the range of the next block.

    Args:
        keys, values: `(B, H_kv, S, d)`.

    Returns:
        `(B, H_kv, S)`, float32, in [0, 1] before sinks, last block and tail are protected.
    """
    length, n_sink, lag = keys.shape[2], press.n_sink, press.lag_size
    n_blocks = (length - n_sink) // lag
    if n_blocks < 2:
        recency = torch.arange(length, device=keys.device, dtype=torch.float32) / length
        return protect(recency.expand(keys.shape[:3]), leading(keys, n_sink))
    end = n_sink + n_blocks * lag
    blocks = (
        upcast(states[:, :, n_sink:end]).unflatten(2, (n_blocks, lag)) for states in (keys, values)
    )
    key_scores, value_scores = (_variation(block) for block in blocks)
    scores = (key_scores + value_scores) / 2  # (B, H_kv, n_blocks - 1, lag)
    if not press.cross_scoring:
        scores = scores.argsort(dim=-1).argsort(dim=-1) / lag
    n_tail = length - end + lag
    scores = pad(scores.flatten(2), (n_sink, n_tail))
    return protect(scores, leading(keys, n_sink) | trailing(keys, n_tail))


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
