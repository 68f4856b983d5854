"""Tile sizes, and memory that is reused from tile to tile.

On a CPU, tensors that exceed the cache and are newly allocated take two to four times as long; on a
GPU, large tiles are faster.
"""

from __future__ import annotations

import math

from torch import Tensor

NUMBERS = {"cpu": 2**19}
"""Elements to compute at a time, by device."""

NUMBERS_ELSEWHERE = 2**26


def rows_at_once(x: Tensor, per_row: int) -> int:
    """How many rows of `per_row` elements to compute at a time, on the device of `x`."""
    return max(1, NUMBERS.get(x.device.type, NUMBERS_ELSEWHERE) // max(1, per_row))


class Scratch:
    """Memory that is reused for every tile: each overwrites the one before it.

    Args:
        like: a tensor of the dtype and device of the tiles.
    """

    def __init__(self, like: Tensor) -> None:
        self._flat = like.new_empty(0)

    def of(self, *shape: int) -> Tensor:
        """An uninitialized tensor of `shape`; it overwrites those returned before."""
        size = math.prod(shape)
        if self._flat.numel() < size:
            self._flat = self._flat.new_empty(size)
        return self._flat[:size].view(shape)
