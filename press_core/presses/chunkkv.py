"""ChunkKV (Liu et al., arXiv 2502.00299): whole chunks stay together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.eviction import Eviction
from press_core.press import require
from press_core.select import upcast


@dataclass
class ChunkKV(Wrapper):
    """Keeps whole chunks of neighbouring tokens (Liu et al., arXiv 2502.00299).

    Of `ceil(S / chunk_length)` chunks it keeps the share that the wrapped press keeps of tokens, at
    least one; every head keeps the same. Contexts shorter than one chunk are the wrapped press's.

    Attributes:
        press: scores tokens.
        chunk_length: tokens per chunk; a shorter last one counts as one.
    """

    chunk_length: int = 20

    row_by_row = True  # whether the shorter last chunk is kept

    def validate(self) -> None:
        super().validate()
        require(self, "chunk_length", self.chunk_length >= 1, "a number of tokens, 1 or more")

    def decide(self, call: AttentionCall) -> Eviction:
        if call.length < self.chunk_length:
            return self.press.evict(call)
        if self.leaves_whole(call):
            return Eviction.nothing(call)
        scores = self.scorer.token_scores(call)
        positions = best_chunks(scores, self.chunk_length, self.ratio_of(call.length))
        return Eviction.keep(call, positions.expand(*call.keys.shape[:2], -1))

    def leaves_whole(self, call: AttentionCall) -> bool:
        return self.ratio_of(call.length) == 0 or not self.is_long_enough(call.length)


def best_chunks(scores: Tensor, chunk_length: int, compression_ratio: float) -> Tensor:
    """Positions of the tokens of the best chunks, `(n,)`, in temporal order.

    Args:
        scores: `(1, H_kv, S)`, summed over heads and averaged over each chunk.
    """
    length = scores.shape[-1]
    n_chunks = -(-length // chunk_length)
    per_token = upcast(scores).sum(dim=(0, 1))
    chunks = pad(per_token, (0, n_chunks * chunk_length - length)).view(n_chunks, chunk_length)
    counts = torch.full((n_chunks,), chunk_length, device=scores.device)
    counts[-1] = length - (n_chunks - 1) * chunk_length
    n = max(1, int(n_chunks * (1 - compression_ratio)))
    best = (chunks.sum(dim=-1) / counts).topk(n).indices.sort().values
    tokens = best[:, None] * chunk_length + torch.arange(chunk_length, device=scores.device)
    return tokens[tokens < length]
