"""Rows of a batch are judged by their tokens, and put together again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from press_core import Eviction, PrunedLayer
from press_core.cache.positions import tokens_seen
from press_core.cache.storage import Storage
from press_core.rows import Left, RowGroup, parts_of, rows_alike
from tests.press_core.drawn import DIM, KV_HEADS, drawn_call


def tokens(*rows: str) -> Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


@pytest.mark.parametrize(
    ("occupied", "row_by_row", "expected"),
    [
        ((), False, [([0, 1, 2], None)]),
        ((), True, [([0], None), ([1], None), ([2], None)]),
        (("..x", "xxx", "..x"), False, [([0, 2], [2]), ([1], [0, 1, 2])]),
        (("..x", "xxx", "..x"), True, [([0], [2]), ([1], [0, 1, 2]), ([2], [2])]),
        # As many tokens, and other holes: padding between turns too.
        ((".xx.x", ".xxx.", ".xx.x"), False, [([0, 2], [1, 2, 4]), ([1], [1, 2, 3])]),
    ],
)
def test_rows_of_equal_padding_are_judged_together(
    occupied: tuple[str, ...], row_by_row: bool, expected: object
) -> None:
    groups = rows_alike(3, tokens(*occupied) if occupied else None, row_by_row)
    assert [(r, None if slots is None else slots.tolist()) for r, slots in groups] == expected


def left(occupied: Tensor | None, n_kept: dict[int, int]) -> Left:
    """Each row's last tokens are kept: how many, by the first row of its group."""
    call = drawn_call(6, batch=3)
    groups = []
    for rows, slots, part in parts_of(call, occupied, row_by_row=False):
        kept = torch.arange(part.length)[-n_kept[rows[0]] :]
        eviction = Eviction.keep(part, kept.expand(len(rows), KV_HEADS, -1))
        groups.append(RowGroup(rows, slots, eviction))
    return Left(call, groups)


def test_rows_come_back_in_their_order_the_shorter_aligned_on_the_right() -> None:
    batch = left(tokens(".xx.xx", "xxxxxx", "x.xxx."), {0: 3, 1: 4, 2: 2})
    assert (batch.length, batch.rows, batch.is_whole) == (4, (3, 4, 2), False)
    keys = batch.joined(lambda eviction: eviction.keys)
    expected = [[-1, 2, 4, 5], [2, 3, 4, 5], [-1, -1, 3, 4]]
    for row, slots in enumerate(expected):
        held = [slot for slot in slots if slot >= 0]
        assert torch.equal(keys[row, :, -len(held) :], batch.call.keys[row][:, held])
        assert not keys[row, :, : -len(held)].any() or len(held) == 4
    assert batch.known_slots().tolist() == [[row] * KV_HEADS for row in expected]
    positions = batch.of_slots(torch.arange(10, 16).view(1, 1, -1))
    assert positions is not None
    assert positions.tolist() == [[[p + 10 if p >= 0 else -1 for p in r]] * KV_HEADS
                                  for r in expected]  # fmt: skip


def test_tokens_seen_of_a_row_leave_its_padding_out() -> None:
    states = torch.zeros(3, KV_HEADS, 6, DIM)
    layer = PrunedLayer(Storage(DynamicLayer()).holding(states, states))
    assert tokens_seen(layer, tokens(".xx.xx", "xxxxxx", ".xx.xx")) == (4, 6, 4)
    assert tokens_seen(layer, None) == (6, 6, 6)
