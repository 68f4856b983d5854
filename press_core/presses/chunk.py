"""Each chunk of the context pruned by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.eviction import Eviction
from press_core.press import require
from press_core.select import Tokens, kept_of_chunks


@dataclass
class Chunk(Wrapper):
    """Scores and prunes each chunk by itself, with the chunk's own queries and positions.

    Attributes:
        press: scores tokens.
        chunk_length: tokens per chunk; the last one may be shorter.
    """

    chunk_length: int = 1024

    def validate(self) -> None:
        super().validate()
        require(self, "chunk_length", self.chunk_length >= 1, "a number of tokens, 1 or more")

    def decide(self, call: AttentionCall) -> Eviction:
        step, amount = self.chunk_length, self.amount
        starts = range(0, call.length, step)
        chunks = [call.chunk(start, start + step) for start in starts]
        if isinstance(amount, Tokens):
            numbers = kept_of_chunks(call.length, step, amount)
            chunks = [chunk.with_budget(n) for chunk, n in zip(chunks, numbers, strict=True)]
        evictions = [self.press.evict(chunk) for chunk in chunks]
        if all(eviction.is_whole for eviction in evictions):
            return Eviction.nothing(call)
        kept = [
            start + eviction.known_kept for start, eviction in zip(starts, evictions, strict=True)
        ]
        return Eviction.keep(call, torch.cat(kept, dim=-1))
