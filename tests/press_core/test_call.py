"""A call gives a press its queries, and splits a padded batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.testbed.families import FAMILIES, build
from press_core import AttentionCall, UnsupportedInputError, attention_sites

LENGTH = 7


def _call(recorded: Any, **fields: Any) -> AttentionCall:
    return replace(
        AttentionCall(
            site=recorded.site,
            hidden_states=recorded.hidden_states,
            keys=recorded.keys,
            values=recorded.values,
            attentions=recorded.weights,
            position_embeddings=recorded.position_embeddings,
            position_ids=torch.arange(LENGTH)[None],
            query=recorded.collected[0],
        ),
        **fields,
    )


@pytest.mark.parametrize("last", [None, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_have_the_models_bits_whichever_way_they_came(
    family: str, dtype: torch.dtype, last: int | None, record: Callable[..., Any]
) -> None:
    recorded = record(family, LENGTH, dtype)
    wanted = recorded.query[:, :, -(last or LENGTH) :]
    by_hook = _call(recorded).queries(last)
    by_patch = _call(recorded, query=recorded.query, query_is_rotated=True).queries(last)
    for queries in (by_hook, by_patch):
        assert queries.is_contiguous()
        assert torch.equal(queries, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_before_rope_agree_bit_for_bit_and_are_those_of_the_model(
    family: str, record: Callable[..., Any]
) -> None:
    recorded = record(family, LENGTH)
    by_hook = _call(recorded).queries_before_rope()
    by_patch = _call(recorded, query=recorded.query, query_is_rotated=True).queries_before_rope()
    assert torch.equal(by_hook, by_patch)
    torch.testing.assert_close(by_hook, recorded.collected[0], atol=1e-5, rtol=1e-4)


def test_queries_that_nobody_collected_are_missed_by_name(record: Callable[..., Any]) -> None:
    call = _call(record("llama", LENGTH), query=None)
    with pytest.raises(UnsupportedInputError, match="uses_queries"):
        call.queries()


def test_queries_follow_the_tokens_that_are_left(record: Callable[..., Any]) -> None:
    recorded = record("llama", LENGTH)
    tokens = torch.tensor([[[0, 2, 5, 6], [1, 2, 3, 6]], [[0, 1, 2, 3], [3, 4, 5, 6]]])
    call = _call(recorded, tokens=tokens, keys=recorded.keys[:, :, :4])
    for last in (None, 2):
        queries = call.queries(last)
        before = call.queries_before_rope()
        for row in range(2):
            for head in range(4):  # two query heads to a KV head
                left = tokens[row, head // 2]
                slots = left if last is None else left[-last:]
                assert torch.equal(queries[row, head], recorded.query[row, head, slots])
                torch.testing.assert_close(
                    before[row, head],
                    recorded.collected[0][row, head, left],
                    atol=1e-5,
                    rtol=1e-4,
                )


def test_the_next_position_follows_the_last(record: Callable[..., Any]) -> None:
    recorded = record("llama", LENGTH)
    rows = torch.tensor([[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]])
    assert _call(recorded).next_position.tolist() == [[LENGTH]]
    assert _call(recorded, position_ids=rows).next_position.tolist() == [[5], [7]]
    assert _call(recorded, position_ids=None).next_position.tolist() == [[LENGTH]]


def test_keeping_gathers_and_remembers(record: Callable[..., Any]) -> None:
    call = _call(record("llama", LENGTH))
    assert call.kept is None
    positions = torch.tensor([[[0, 3], [1, 6]], [[2, 4], [5, 6]]])
    keys, values = call.keep(positions)
    assert call.kept is positions
    for row in range(2):
        for head in range(2):
            kept = positions[row, head]
            assert torch.equal(keys[row, head], call.keys[row, head, kept])
            assert torch.equal(values[row, head], call.values[row, head, kept])


def test_a_batch_without_padding_is_one_part(record: Callable[..., Any]) -> None:
    call = _call(record("llama", LENGTH))
    ((rows, start, part),) = call.parts([])
    assert (rows, start) == ([0, 1], 0)
    assert part is call


def test_rows_of_equal_padding_are_one_part() -> None:
    site = attention_sites(build("llama"))[0]
    keys = torch.randn(4, 2, LENGTH, 16)
    call = AttentionCall(site, torch.zeros(4, LENGTH, 64), keys, keys)
    parts = list(call.parts([2, 0, 2, 5]))
    assert [(rows, start) for rows, start, _ in parts] == [([1], 0), ([0, 2], 2), ([3], 5)]
    for rows, start, part in parts:
        assert torch.equal(part.keys, keys[rows, :, start:])
    ((rows, start, part),) = call.parts([3])  # one number for all rows
    assert (rows, start) == ([0, 1, 2, 3], 3)
    assert part.length == LENGTH - 3


def test_a_part_holds_nothing_of_the_padding(record: Callable[..., Any]) -> None:
    call = _call(record("llama", LENGTH))
    whole = call.queries()
    (_, (rows, start, part)) = call.parts([0, 3])
    assert (rows, start) == ([1], 3)
    assert part.length == part.hidden_states.shape[1] == 4
    assert torch.equal(part.hidden_states, call.hidden_states[1:, 3:])
    assert torch.equal(part.values, call.values[1:, :, 3:])
    assert part.attentions is not None
    assert call.attentions is not None
    assert torch.equal(part.attentions, call.attentions[1:, :, 3:, 3:])
    assert torch.equal(part.queries(), whole[1:, :, 3:])
    assert torch.equal(part.queries(2), whole[1:, :, -2:])
    assert part.next_position.tolist() == [[LENGTH]]


def test_a_part_of_tokens_that_are_left_keeps_counting_from_the_forwards_start(
    record: Callable[..., Any],
) -> None:
    recorded = record("llama", LENGTH)
    tokens = torch.tensor([[[2, 3, 6]] * 2, [[-1, 4, 6]] * 2])  # an empty slot in the second row
    call = _call(recorded, tokens=tokens, keys=recorded.keys[:, :, :3])
    (_, (rows, start, part)) = call.parts([0, 1])
    assert (rows, start, part.length) == ([1], 1, 2)
    assert torch.equal(part.queries(), recorded.query[1:, :, [4, 6]])
    assert part.attentions is None  # weights over other keys than those that are left
