"""States of the latest tokens, kept while decoding for as long as a press may ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RecentStates:
    """Something known of the latest tokens, forward by forward.

    Not one tensor: each step would copy all of it.

    Attributes:
        parts: `(B, ..., q, channels)` for each forward of `q` tokens.
        n: tokens in all.
    """

    parts: tuple[Tensor, ...] = ()
    n: int = 0

    def followed_by(self, states: Tensor, limit: int | None) -> RecentStates:
        """The same with those of the next forward, `(B, ..., q, channels)`, of which it has a copy.

        Args:
            limit: of how many tokens before those the states are still needed; None: of all.
        """
        over = 0 if limit is None else max(0, self.n - limit)
        before = self.without_first(over).parts if over else self.parts
        held = self.n - over
        copy = states.clone(memory_format=torch.contiguous_format)
        return RecentStates((*before, copy), held + states.shape[-2])

    def without_first(self, n: int) -> RecentStates:
        """All but the first `n` tokens."""
        parts, first = self.parts, 0
        left = n
        while left and parts[first].shape[-2] <= left:
            left -= parts[first].shape[-2]
            first += 1
        cut = (parts[first][..., left:, :].clone(),) if left else ()
        return RecentStates((*cut, *parts[first + bool(left) :]), self.n - n)

    def last(self, limit: int) -> Tensor:
        """Those of the last `limit` tokens, `(B, ..., limit or n, channels)`."""
        return self.joined()[..., -limit:, :]

    def joined(self) -> Tensor:
        """`(B, ..., n, channels)`."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, dim=-2)

    def without_last(self, n: int) -> RecentStates:
        """All but the last `n` tokens."""
        kept = self.joined()[..., : max(0, self.n - n), :]
        return RecentStates((kept,), kept.shape[-2])

    def of_rows(self, rows: Tensor) -> RecentStates:
        """The same for some rows of the batch."""
        return RecentStates(tuple(x[rows.to(x.device)] for x in self.parts), self.n)


NO_STATES = RecentStates()
