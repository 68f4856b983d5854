"""Each chunk of the context pruned by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.eviction import Eviction
from press_core.press import require


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
        step = self.chunk_length
        starts = range(0, call.length, step)
        evictions = [self.press.evict(call.chunk(start, start + step)) for start in starts]
        if all(eviction.is_whole for eviction in evictions):
            return Eviction.nothing(call)
        kept = [
            start + eviction.known_kept for start, eviction in zip(starts, evictions, strict=True)
        ]
        return Eviction.keep(call, torch.cat(kept, dim=-1))
