"""Rows of a batch are judged by their tokens, and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from press_core import AttentionCall, attention_sites
from press_core.cache.pruned import filled
from press_core.cache.storing import BatchEviction, RowGroup, row_groups, tokens_seen
from press_core.eviction import Eviction
from tests.support import build

KV_HEADS, DIM = 2, 16


def _tokens(*rows: str) -> Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


def _groups(batch: int, occupied: Tensor | None, row_by_row: bool = False) -> Any:
    found = row_groups(batch, occupied, row_by_row)
    return [(rows, None if slots is None else slots.tolist()) for rows, slots in found]


# ---- rows that are judged together ---------------------------------------------------------------


def test_a_batch_without_padding_is_one_group() -> None:
    assert _groups(3, None) == [([0, 1, 2], None)]


def test_each_row_is_a_group_where_rows_are_judged_by_themselves() -> None:
    assert _groups(3, None, row_by_row=True) == [([0], None), ([1], None), ([2], None)]
    occupied = _tokens("..xx", "xxxx", "..xx")
    assert _groups(3, occupied, row_by_row=True) == [
        ([0], [2, 3]),
        ([1], [0, 1, 2, 3]),
        ([2], [2, 3]),
    ]


def test_rows_of_equal_padding_are_one_group() -> None:
    occupied = _tokens("..xxxxx", "xxxxxxx", "..xxxxx", ".....xx")
    assert _groups(4, occupied) == [
        ([0, 2], [2, 3, 4, 5, 6]),
        ([1], list(range(7))),
        ([3], [5, 6]),
    ]


def test_rows_are_told_apart_by_their_holes_not_by_their_number_of_tokens() -> None:
    occupied = _tokens(".xx.xx", ".xxx.x", ".xx.xx", "xxxxxx")  # padding between turns too
    assert _groups(4, occupied) == [
        ([0, 2], [1, 2, 4, 5]),
        ([1], [1, 2, 3, 5]),
        ([3], list(range(6))),
    ]


# ---- put together --------------------------------------------------------------------------------


def _batch(occupied: Tensor | None, n_kept: dict[int, int], batch: int = 3) -> BatchEviction:
    """Each row's last tokens are kept: how many, by the first row of its group."""
    length = 6
    keys = torch.arange(batch * KV_HEADS * length * DIM).view(batch, KV_HEADS, length, DIM).double()
    site = attention_sites(build("llama", num_layers=1))[0]
    call = AttentionCall(site, torch.zeros(batch, length, 64), keys, -keys)
    groups = []
    for rows, slots in row_groups(batch, occupied, False):
        part = call.of_rows(rows, slots)
        kept = torch.arange(part.length)[-n_kept[rows[0]] :]
        eviction = Eviction.keep(part, kept.expand(len(rows), KV_HEADS, -1))
        groups.append(RowGroup(rows, slots, eviction))
    return BatchEviction(call, groups)


def test_rows_come_back_in_their_order_the_shorter_aligned_on_the_right() -> None:
    batch = _batch(_tokens(".xx.xx", "xxxxxx", ".xx.xx"), {0: 2, 1: 3})
    assert (batch.length, batch.is_uneven, batch.is_whole) == (3, True, False)
    assert batch.mean_kept == pytest.approx((2 + 3 + 2) / 3)
    keys = batch.joined(lambda eviction: eviction.keys, 0)
    for row, slots in enumerate([[4, 5], [3, 4, 5], [4, 5]]):
        assert torch.equal(keys[row, :, -len(slots) :], batch.call.keys[row][:, slots])
        assert not keys[row, :, : 3 - len(slots)].any()


def test_tokens_seen_of_a_row_leave_its_padding_out() -> None:
    occupied = _tokens(".xx.xx", "xxxxxx", ".xx.xx")
    states = torch.zeros(3, KV_HEADS, 6, DIM)
    layer = filled(DynamicLayer(), states, states)
    assert tokens_seen(layer, occupied, 3) == (4, 6, 4)
    assert tokens_seen(layer, None, 3) == (6, 6, 6)


def test_what_is_known_of_slots_follows_what_is_left_of_each_row() -> None:
    batch = _batch(_tokens(".xx.xx", "xxxxxx", "x.xxx."), {0: 3, 1: 4, 2: 2})
    positions = batch.of_slots(torch.arange(10, 16).view(1, 1, -1))
    assert positions is not None
    expected = [[-1, 12, 14, 15], [12, 13, 14, 15], [-1, -1, 13, 14]]
    assert positions.tolist() == [[row] * KV_HEADS for row in expected]


def test_nothing_is_known_of_slots_where_a_press_did_not_say() -> None:
    batch = _batch(None, {0: 2})
    assert batch.of_slots(None) is None
    (group,) = batch.groups
    unsaid = Eviction.from_states(group.eviction.call, *group.eviction)
    batch = BatchEviction(batch.call, [RowGroup(group.rows, None, unsaid)])
    assert batch.of_slots(torch.arange(6).view(1, 1, -1)) is None


def test_a_batch_of_one_group_is_not_copied() -> None:
    batch = _batch(None, {0: 2})
    assert not batch.is_uneven
    assert batch.joined(lambda eviction: eviction.keys, 0) is batch.evictions[0].keys


def test_rows_left_whole_are_whole_together() -> None:
    call = _batch(None, {0: 2}).call
    groups = [RowGroup([row], None, Eviction.nothing(call.of_rows([row], None))) for row in (0, 1)]
    assert BatchEviction(call, groups).is_whole
    kept = Eviction.keep(call.of_rows([2], None), torch.arange(6).expand(1, KV_HEADS, -1))
    assert not BatchEviction(call, [*groups, RowGroup([2], None, kept)]).is_whole
