"""R-KV (Cai et al., arXiv 2505.24133): important, and not said before."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, normalize, pad

from press_core.attention import window_attention
from press_core.blocks import rows_at_once
from press_core.call import AttentionCall
from press_core.press import Needs, RatioScorer, require
from press_core.select import protect, trailing, upcast


@dataclass
class RKV(RatioScorer):
    """Keeps what the last queries attend to, less what other keys repeat (R-KV, arXiv 2505.24133).

    `mix_lambda * importance - (1 - mix_lambda) * redundancy`. Made for reasoning models, to prune
    while they decode: `DecodingPress(RKVPress(), compression_interval=128, target_size=1024)`.
    Contexts of at most `window_size` tokens are left whole.

    Attributes:
        window_size: last tokens, whose queries vote and which are themselves always kept.
        kernel_size: width of the max pooling over neighbouring keys; odd.
        mix_lambda: weight of the importance, in [0, 1].
        similarity_threshold: cosine from which on a key repeats another.
        n_retained: how many of the keys that repeat another, the latest, are not blamed for it.
    """

    window_size: int = 8
    kernel_size: int = 7
    mix_lambda: float = 0.1
    similarity_threshold: float = 0.5
    n_retained: int = 1

    needs = Needs.QUERIES

    def validate(self) -> None:
        super().validate()
        require(self, "window_size", self.window_size >= 1, "a number of tokens, 1 or more")
        odd = self.kernel_size >= 1 and self.kernel_size % 2 == 1
        require(self, "kernel_size", odd, "odd and positive")
        require(self, "mix_lambda", 0 <= self.mix_lambda <= 1, "a number in [0, 1]")
        fits = -1 <= self.similarity_threshold <= 1
        require(self, "similarity_threshold", fits, "a number in [-1, 1]")
        require(self, "n_retained", self.n_retained >= 0, "a number of tokens, 0 or more")

    def is_long_enough(self, length: int) -> bool:
        return length > self.window_size

    def score_tokens(self, call: AttentionCall) -> Tensor:
        important = importance(call, self.window_size, self.kernel_size)
        similar = similarity(call.keys, self.similarity_threshold, self.n_retained)
        redundant = similar.softmax(dim=-1)[..., : call.length - self.window_size]
        scores = self.mix_lambda * important - (1 - self.mix_lambda) * redundant
        return protect(pad(scores, (0, self.window_size)), trailing(call.keys, self.window_size))


def importance(call: AttentionCall, window_size: int, kernel_size: int) -> Tensor:
    """Attention of the last queries, the most of each group and of neighbouring keys.

    Returns:
        Mean over the queries, `(B, H_kv, S - w)`, float32.
    """
    before = call.length - window_size
    weights = window_attention(call, window_size)[..., :before].amax(dim=2)  # (B, H_kv, w, S - w)
    pooled = max_pool1d(weights.flatten(0, 1), kernel_size, stride=1, padding=kernel_size // 2)
    return pooled.view_as(weights).mean(dim=2)


def similarity(keys: Tensor, threshold: float, n_retained: int, block: int | None = None) -> Tensor:
    """Mean cosine of each key with all keys, `(B, H_kv, S)` float32.

    Its own and, of each key, those of the `n_retained` latest that are more similar to it than
    `threshold` count as zero, so that the last mention of something stays.

    All cosines of a key sum to one product with the sum of all keys. Those that count as zero are
    looked for from the latest on, until each key has its share.

    Args:
        keys: `(B, H_kv, S, d)`.
        block: how many keys to compare with as many at a time; None: what suits the device.
    """
    directions = normalize(upcast(keys), dim=-1)
    total = (directions @ directions.sum(dim=2).unsqueeze(-1)).squeeze(-1)
    total -= directions.square().sum(dim=-1)
    left = torch.full(keys.shape[:3], n_retained, device=keys.device)
    step = block or math.isqrt(rows_at_once(keys, keys.shape[0] * keys.shape[1]))
    starts = range(0, keys.shape[2], step)
    pairs = ((a, b) for a in reversed(starts) for b in reversed(starts[a // step :]))
    for rows, columns in ((slice(a, a + step), slice(b, b + step)) for a, b in pairs):
        if not bool(left[:, :, rows].any() | left[:, :, columns].any()):
            continue
        cosines = directions[:, :, rows] @ directions[:, :, columns].mT
        if rows == columns:
            cosines.diagonal(dim1=-2, dim2=-1).zero_()
        similar = cosines > threshold
        if not bool(similar.any()):
            continue
        excused, left[:, :, rows] = _excused(cosines, similar, left[:, :, rows])
        total[:, :, columns] -= excused
        if rows != columns:  # each of a pair repeats the other
            excused, left[:, :, columns] = _excused(cosines.mT, similar.mT, left[:, :, columns])
            total[:, :, rows] -= excused
    return total / keys.shape[2]


def _excused(cosines: Tensor, similar: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """What the latest keys that are similar to others are not blamed for.

    Args:
        cosines, similar: `(B, H_kv, rows, columns)`, whether columns repeat rows.
        left: `(B, H_kv, rows)` int64, how many columns may still be excused.

    Returns:
        The sum of each column's cosines that count as zero, and how many may be excused later.
    """
    excused = torch.zeros_like(cosines[:, :, 0])
    columns = torch.arange(cosines.shape[-1], dtype=torch.int32, device=cosines.device)
    places = torch.where(similar, columns, -1)
    while bool((found := (left > 0) & ((last := places.amax(dim=-1)) >= 0)).any()):
        index = last.clamp(min=0).long()
        values = cosines.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        excused.scatter_add_(-1, index, values.masked_fill(~found, 0))
        places.scatter_(-1, index.unsqueeze(-1), -1)
        left = left - found.long()
    return excused, left
