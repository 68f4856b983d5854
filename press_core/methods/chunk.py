"""Each chunk of the context pruned by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.scope import require
from press_core.wrapping import Wrapper


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

    def chunks(self, call: AttentionCall) -> list[AttentionCall]:
        """A call for each chunk."""
        step = self.chunk_length
        return [call.chunk(start, start + step) for start in range(0, call.length, step)]

    def keep(self, call: AttentionCall, chunks: list[AttentionCall]) -> tuple[Tensor, Tensor]:
        """Keep of `call` what was kept of its `chunks`."""
        if all(chunk.kept is None for chunk in chunks):
            return call.keys, call.values
        shape, device = call.keys.shape[:2], call.keys.device
        kept, start = [], 0
        for chunk in chunks:
            everything = torch.arange(chunk.length, device=device).expand(*shape, -1)
            kept.append(start + (everything if chunk.kept is None else chunk.kept))
            start += chunk.length
        return call.keep(torch.cat(kept, dim=-1))
