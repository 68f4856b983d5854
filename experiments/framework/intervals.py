"""Intervals of 95% confidence."""

from __future__ import annotations

from math import comb
from typing import Any

import numpy as np


def wilson(right: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share: 95% for the default `z`.

    Args:
        right: successes, `0 <= right <= total`.
        total: trials, at least 1.

    Returns:
        Lower and upper end, in [0, 1].
    """
    share = right / total
    centre = share + z * z / (2 * total)
    spread = z * (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5
    scale = 1 + z * z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def median_interval(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """The interval between two order statistics that holds the median with 95% confidence.

    With fewer than six values there is none that narrow, and their range is given.
    """
    ordered = np.sort(values)
    n = len(ordered)
    below = np.cumsum([comb(n, k) / 2**n for k in range(n + 1)])  # P(at most k below the median)
    skip = int(np.searchsorted(below, 0.025, side="right"))
    return float(ordered[max(skip - 1, 0)]), float(ordered[min(n - skip, n - 1)])
