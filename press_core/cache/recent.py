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
        is_static: class attribute; whether these keep their shape.
    """

    is_static = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Hold `keys` and `values` `(N, n, d)`."""
        self.keys, self.values = pad(keys, (0, 0, AHEAD, 0)), pad(values, (0, 0, AHEAD, 0))

    @classmethod
    def like(cls, keys: Tensor, values: Tensor) -> Recent:
        """None yet, of heads with such states as `keys` and `values` `(B, H_kv, S, d)`."""
        n = keys.shape[0] * keys.shape[1]
        return cls(*(x.new_empty(n, 0, x.shape[-1]) for x in (keys, values)))

    @property
    def n(self) -> int:
        """How many there are."""
        return int(self.keys.shape[1]) - AHEAD

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values, `(N, n, d)` each."""
        return self.keys[:, AHEAD:], self.values[:, AHEAD:]

    def seen_of_buffer(self, n_queries: int, n: int, n_held: int) -> Tensor | None:
        """See `PrunedLayer.seen_of_buffer`."""
        return None

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

    def count(self, n_seen: int) -> Any:
        """What the model is to count with, where `n_seen` tokens were seen before these."""
        return n_seen + self.n

    def mask_columns(self, n_seen: int, n_new: int) -> int:
        """Columns of the model's mask, where `n_seen` tokens were seen before these."""
        return n_seen + self.n + n_new
