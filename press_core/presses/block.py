"""Block by block (Park et al., arXiv 2504.15364): bounded memory for scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.eviction import Eviction
from press_core.press import Needs, require
from press_core.select import top_positions


@dataclass
class Block(Wrapper):
    """Prunes block by block: what is kept so far and the next block compete for the budget.

    The block-wise eviction of KeyDiff (Park et al., arXiv 2504.15364), for any score. Where that
    takes keys and values alone, a prefill that comes in chunks is pruned after each: the cache
    holds no more than the budget and a chunk.

    Attributes:
        press: scores tokens.
        block_size: tokens that join the competition at a time.
    """

    block_size: int = 128

    def validate(self) -> None:
        super().validate()
        require(self, "block_size", self.block_size >= 1, "a number of tokens, 1 or more")

    @property
    def prunes_chunks(self) -> bool:  # type: ignore[override]
        return self.scorer.needs is Needs.NOTHING

    def decide(self, call: AttentionCall) -> Eviction:
        if self.leaves_whole(call):
            return Eviction.nothing(call)
        n = self.budget(call)
        kept = _tokens(call, 0, n)
        for start in range(n, call.length, self.block_size):
            block = _tokens(call, start, min(start + self.block_size, call.length))
            kept = self.compete(call, torch.cat((kept, block), dim=-1), n)
        return Eviction.keep(call, kept)

    def compete(self, call: AttentionCall, candidates: Tensor, n: int) -> Tensor:
        """The best `n` of `candidates` `(B, H_kv, m)`; the last, where there are too few to judge.

        Returns:
            `(B, H_kv, n)` int64, ascending.
        """
        if not self.is_long_enough(candidates.shape[-1]):
            return candidates[..., -n:]
        scores = self.scorer.token_scores(call.select(candidates).with_budget(n))
        return candidates.gather(-1, top_positions(scores, n))


def _tokens(call: AttentionCall, start: int, stop: int) -> Tensor:
    tokens = torch.arange(start, stop, device=call.keys.device)
    return tokens.expand(*call.keys.shape[:2], -1)
