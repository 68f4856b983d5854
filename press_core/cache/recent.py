"""Tokens that come after heads were left with different numbers of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

AHEAD = 2
"""Empty slots ahead of recent tokens: a compiler makes other graphs for lengths of 0 and 1."""


class Recent:
    """The tokens that came after heads were left with different numbers, the same for all.

    Attributes:
        keys, values: `(N, AHEAD + n, d)`.
        room: see `PrunedLayer`.
    """

    room: int | None = None

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Hold `keys` and `values` `(N, n, d)`."""
        self.keys, self.values = pad(keys, (0, 0, AHEAD, 0)), pad(values, (0, 0, AHEAD, 0))

    @property
    def n(self) -> int:
        """How many there are."""
        return int(self.keys.shape[1]) - AHEAD

    @property
    def n_counted(self) -> Any:
        """See `PrunedLayer`."""
        return self.n

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values, `(N, n, d)` each."""
        return self.keys[:, AHEAD:], self.values[:, AHEAD:]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add states `(N, q, d)`."""
        # Under autocast a decode step may come in another dtype than the prefill did.
        self.keys = torch.cat((self.keys, keys.to(self.keys.dtype)), dim=1)
        self.values = torch.cat((self.values, values.to(self.values.dtype)), dim=1)

    def drop_last(self, n: int) -> None:
        self.keys, self.values = self.keys[:, :-n], self.values[:, :-n]

    def clear(self) -> None:
        """Hold nothing any more."""
        self.keys, self.values = self.keys[:, :AHEAD].clone(), self.values[:, :AHEAD].clone()

    def select(self, heads: Tensor) -> None:
        """Hold those of some heads."""
        self.keys, self.values = self.keys[heads], self.values[heads]
