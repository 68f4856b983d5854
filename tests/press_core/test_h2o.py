"""H2O's sums against a slow reference, without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import patch_impl
from press_core import Needs, Phase, Tokens
from press_core.attention import attention_tiles, received_attention
from tests.press_core.drawn import GROUP, KV, attention_row, drawn_call

LENGTH = 15


def test_received_attention() -> None:
    call = drawn_call(LENGTH)
    found = received_attention(call)
    for row, head in KV:
        expected = torch.zeros(LENGTH).double()
        for member in range(GROUP):
            for token in range(LENGTH):
                weights = attention_row(call, row, head * GROUP + member, token)
                expected[: token + 1] += weights / GROUP
        torch.testing.assert_close(found[row, head], expected, atol=1e-6, rtol=0)


def test_weights_are_never_there_as_a_whole() -> None:
    """Rows at a time: the largest tile is far smaller than the matrix."""
    call = drawn_call(3000, batch=1)
    tiles = attention_tiles(call.site, call.queries(), call.keys)
    assert max(tile.weights.numel() for tile in tiles) < 4 * 3000 * 3000 / 10


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


def test_it_acts_in_both_phases_and_remembers_what_queries_looked_at() -> None:
    press = patch_impl.H2OPress(0.5)
    assert press.phases == Phase.PREFILL | Phase.DECODING
    assert press.needs == Needs.QUERIES | Needs.MEMORY
