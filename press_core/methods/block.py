"""Block by block (Park et al., arXiv 2504.15364): bounded memory for scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.scope import require
from press_core.select import top_positions
from press_core.wrapping import Wrapper


@dataclass
class Block(Wrapper):
    """Prunes block by block: what is kept so far and the next block compete for the budget.

    The block-wise eviction of KeyDiff (Park et al., arXiv 2504.15364), for any score.

    Attributes:
        press: scores tokens.
        block_size: tokens that join the competition at a time.
    """

    block_size: int = 128

    def validate(self) -> None:
        super().validate()
        require(self, "block_size", self.block_size >= 1, "a number of tokens, 1 or more")

    def competition(self, call: AttentionCall) -> Competition:
        """The competition for the tokens of `call`."""
        return Competition(self, call, self.budget(call))


class Competition:
    """What is kept so far, and the rounds to come.

    Candidates too few for the press to judge are settled by recency.

    Attributes:
        kept: `(B, H_kv, n)`, which tokens have won so far.
    """

    def __init__(self, press: Block, call: AttentionCall, n: int) -> None:
        self.press, self.call, self.n = press, call, n
        self.kept = self._tokens(0, n)
        self._candidates = self.kept

    def rounds(self) -> Iterator[AttentionCall]:
        """The call over the candidates of each round; `judge` is to follow."""
        for start in range(self.n, self.call.length, self.press.block_size):
            block = self._tokens(start, min(start + self.press.block_size, self.call.length))
            self._candidates = torch.cat((self.kept, block), dim=-1)
            self.kept = self._candidates[..., -self.n :]
            if self.press.acts_on(self._candidates.shape[-1]):
                this = self.call.select(self._candidates)
                this.target = self.n
                yield this

    def judge(self, scores: Tensor) -> None:
        """Settle a round by the `scores` of its candidates, `(B, H_kv, m)`."""
        self.kept = self._candidates.gather(-1, top_positions(scores, self.n))

    def _tokens(self, start: int, stop: int) -> Tensor:
        tokens = torch.arange(start, stop, device=self.call.keys.device)
        return tokens.expand(*self.call.keys.shape[:2], -1)
