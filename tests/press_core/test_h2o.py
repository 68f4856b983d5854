"""H2O's choice against a slow one, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import patch_impl
from press_core import Tokens
from tests.press_core.drawn import KV, drawn_call

LENGTH = 15


@pytest.mark.parametrize(
    ("recent_ratio", "n", "recent"),
    [(0.5, 8, 4), (0.5, 7, 4), (0.0, 8, 0), (1.0, 8, 8), (0.2, 5, 1)],
)
def test_recent_and_heavy_share_the_budget(recent_ratio: float, n: int, recent: int) -> None:
    call = drawn_call(LENGTH)
    press = patch_impl.H2OPress(Tokens(n), recent_ratio)
    memory = press.remember(call)
    kept = press.evict(replace(call, memory=memory)).known_kept
    weights = next(iter(memory.values()))
    for row, head in KV:
        before = weights[row, head, : LENGTH - recent].tolist()
        heavy = sorted(range(len(before)), key=lambda j: -before[j])[: n - recent]
        expected = sorted([*heavy, *range(LENGTH - recent, LENGTH)])
        assert kept[row, head].tolist() == expected


def test_what_it_has_received_adds_up() -> None:
    press = patch_impl.H2OPress(0.5)
    call = drawn_call(LENGTH)
    first = press.remember(call)
    again = press.remember(replace(call, memory=first))
    for name, known in first.items():
        torch.testing.assert_close(again[name], 2 * known)
