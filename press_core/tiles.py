"""Tile sizes.

On a CPU, tensors that exceed the cache and are newly allocated take two to four times as long; on a
GPU, large tiles are faster. So tiles share memory: each overwrites the one before it, in an empty
tensor that `resize_` enlarges if a tile does not fit.
"""

from torch import Tensor

NUMBERS = {"cpu": 2**19}
"""Elements to compute at a time, by device."""

NUMBERS_ELSEWHERE = 2**26


def rows_at_once(x: Tensor, per_row: int) -> int:
    """How many rows of `per_row` elements to compute at a time, on the device of `x`."""
    return max(1, NUMBERS.get(x.device.type, NUMBERS_ELSEWHERE) // max(1, per_row))
