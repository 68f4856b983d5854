"""Work done tile by tile, in tiles that a processor keeps at hand.

What is larger than a CPU's cache, and newly allocated at that, takes two to four times as long; a
GPU wants as much at once as fits.
"""

from __future__ import annotations

import math

from torch import Tensor

NUMBERS = {"cpu": 2**19}
"""How many numbers to compute at a time, by device."""

NUMBERS_ELSEWHERE = 2**26


def rows_at_once(x: Tensor, per_row: int) -> int:
    """How many rows of `per_row` numbers each to compute at a time, where `x` is."""
    return max(1, NUMBERS.get(x.device.type, NUMBERS_ELSEWHERE) // max(1, per_row))


class Scratch:
    """Memory for one tile after the other: each is written over the one before it.

    Args:
        like: of which type it is, and where.
    """

    def __init__(self, like: Tensor) -> None:
        self._flat = like.new_empty(0)

    def of(self, *shape: int) -> Tensor:
        """A tensor of `shape` that holds anything, in the place of the one asked for before."""
        size = math.prod(shape)
        if self._flat.numel() < size:
            self._flat = self._flat.new_empty(size)
        return self._flat[:size].view(shape)
