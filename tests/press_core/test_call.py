"""A call gives a press its queries, and can be narrowed to some of its rows, tokens or keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import patch_impl
from experiments.testbed.families import FAMILIES
from press_core import AttentionCall, UnsupportedInputError
from tests.press_core.drawn import called, drawn_call

LENGTH = 7
LEFT = torch.tensor([[[0, 3, 5], [1, 4, 6]], [[2, 4, 5], [3, 5, 6]]])
"""By row and KV head, tokens that another press has left."""
Record = Callable[..., Any]


def _call(recorded: Any, **fields: Any) -> AttentionCall:
    known = {
        "site": recorded.site,
        "hidden_states": recorded.hidden_states,
        "keys": recorded.keys,
        "values": recorded.values,
        "attentions": recorded.weights,
        "position_embeddings": recorded.position_embeddings,
        "position_ids": torch.arange(recorded.keys.shape[2])[None],
        "query": recorded.collected[0],
    }
    return called(**{**known, **fields})


def _as_patched(recorded: Any) -> AttentionCall:
    return _call(recorded, query=recorded.query, query_is_rotated=True)


def _weights(call: AttentionCall) -> Tensor:
    assert call.attentions is not None
    return call.attentions


@pytest.mark.parametrize(  # with as many tokens as heads, the shape does not tell the layout
    ("length", "last"), [(LENGTH, None), (LENGTH, 1), (LENGTH, 3), (4, None), (1, None)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_have_the_models_bits_whichever_way_they_came(
    family: str, dtype: torch.dtype, length: int, last: int | None, record: Record
) -> None:
    recorded = record(family, length, dtype)
    wanted = recorded.query[:, :, -(last or length) :]
    for call in (_call(recorded), _as_patched(recorded)):
        queries = call.queries(last)
        assert queries.is_contiguous()
        assert torch.equal(queries, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_before_rope_agree_bit_for_bit_and_are_those_of_the_model(
    family: str, record: Record
) -> None:
    recorded = record(family, LENGTH)
    by_hook = _call(recorded).queries_before_rope()
    assert torch.equal(by_hook, _as_patched(recorded).queries_before_rope())
    torch.testing.assert_close(by_hook, recorded.collected[0], atol=1e-5, rtol=1e-4)


def test_what_nobody_collected_or_prepared_is_missed_by_name(record: Record) -> None:
    call = _call(record("llama", LENGTH), query=None)
    with pytest.raises(UnsupportedInputError, match=r"Needs\.QUERIES"):
        call.queries()
    with pytest.raises(UnsupportedInputError, match="QFilterPress was called outside of any scope"):
        call.prepared(patch_impl.QFilterPress(0.5))


def test_the_next_position_follows_the_last(record: Record) -> None:
    recorded = record("llama", LENGTH)
    rows = torch.tensor([[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]])
    assert _call(recorded).next_position.tolist() == [[LENGTH]]
    assert _call(recorded, position_ids=rows).next_position.tolist() == [[5], [7]]
    assert _call(recorded, position_ids=None).next_position.tolist() == [[LENGTH]]


def test_a_budget_holds_for_the_whole_call_alone(record: Record) -> None:
    call = _call(record("llama", LENGTH))
    budgeted = call.with_budget(3)
    assert (call.budget, budgeted.budget) == (None, 3)
    assert budgeted.keys is call.keys
    assert budgeted.select(LEFT).budget is None
    assert budgeted.chunk(2, 5).budget is None


# ---- some of the keys ----------------------------------------------------------------------------


def _assert_follow(selected: AttentionCall, left: Tensor, recorded: Any) -> None:
    """Keys, values and queries are those of the tokens that are left."""
    assert selected.length == left.shape[-1]
    for row in range(2):
        for head in range(4):  # two query heads to a KV head
            kept = left[row, head // 2]
            query, before = recorded.query[row, head, kept], recorded.collected[0][row, head, kept]
            assert torch.equal(selected.queries()[row, head], query)
            assert torch.equal(selected.queries(1)[row, head], query[-1:])
            found = selected.queries_before_rope()[row, head]
            torch.testing.assert_close(found, before, atol=1e-5, rtol=1e-4)
            for name in ("keys", "values"):
                states = getattr(recorded, name)[row, head // 2, kept]
                assert torch.equal(getattr(selected, name)[row, head // 2], states)


def test_selecting_keys_leaves_their_values_and_queries(record: Record) -> None:
    recorded = record("llama", LENGTH)
    once = _call(recorded).select(LEFT)
    again = once.select(torch.tensor([0, 2]).expand(2, 2, -1))
    chunk = once.chunk(1, 3)
    for selected, left in (
        (once, LEFT),
        (again, LEFT[..., [0, 2]]),
        (chunk, LEFT[..., 1:3]),
    ):
        assert selected.attentions is None  # weights over other keys than those that are left
        assert selected.key_positions().tolist() == left.tolist()
        _assert_follow(selected, left, recorded)


def test_selected_keys_before_rope_are_those_of_the_model(record: Record) -> None:
    call = _call(record("llama", LENGTH))
    whole, selected = call.keys_before_rope(), call.select(LEFT).keys_before_rope()
    wanted = whole.gather(2, LEFT.unsqueeze(-1).expand_as(selected))
    torch.testing.assert_close(selected, wanted, atol=1e-5, rtol=1e-4)


def test_a_chunk_is_the_call_over_its_tokens(record: Record) -> None:
    recorded = record("llama", LENGTH)
    call = _call(recorded, position_ids=None)
    chunk = call.chunk(2, 5)
    assert torch.equal(chunk.keys, call.keys[:, :, 2:5])
    assert torch.equal(chunk.values, call.values[:, :, 2:5])
    assert torch.equal(chunk.hidden_states, call.hidden_states[:, 2:5])
    assert torch.equal(chunk.queries(), recorded.query[:, :, 2:5])
    assert torch.equal(_weights(chunk), recorded.weights[:, :, 2:5, 2:5])
    assert chunk.key_positions().tolist() == [[[2, 3, 4]]]
    assert call.chunk(5, 100).length == LENGTH - 5


def test_what_is_known_of_tokens_is_aligned_to_keys(record: Record) -> None:
    recorded = record("llama", LENGTH)
    per_token = torch.arange(LENGTH).expand(2, 2, LENGTH)
    call = _call(recorded)
    assert call.align_to_keys(per_token) is per_token
    assert call.select(LEFT).align_to_keys(per_token).tolist() == LEFT.tolist()
    decoding = _call(recorded, hidden_states=recorded.hidden_states[:, -2:])
    with pytest.raises(UnsupportedInputError, match=r"7 keys .* those of 2 tokens"):
        decoding.align_to_keys(per_token[..., :2])


# ---- some of the rows ----------------------------------------------------------------------------


def test_rows_are_taken_of_everything_that_has_them() -> None:
    ids = torch.arange(4)[:, None] + torch.arange(LENGTH)
    call = drawn_call(LENGTH, batch=4, position_ids=ids)
    scores, received = torch.randn(4, 2, 3), torch.randn(4, 2, LENGTH)
    call = replace(call, carried={"a": scores}, memory={"b": received})
    call = call.replace(when=replace(call.when, seen=(7, 6, 5, 4)))
    rows = [0, 2]
    part = call.of_rows(rows, torch.arange(2, LENGTH))
    assert torch.equal(part.keys, call.keys[rows, :, 2:])
    assert torch.equal(part.hidden_states, call.hidden_states[rows, 2:])
    assert part.position_ids is not None
    assert torch.equal(part.position_ids, ids[rows, 2:])
    assert torch.equal(part.carried["a"], scores[rows])
    assert torch.equal(part.memory["b"], received[rows, :, 2:])
    assert part.when.seen == (7, 5)


@pytest.mark.parametrize("slots", [[3, 4, 5, 6], [1, 2, 4, 6]], ids=["padding", "holes"])
def test_rows_hold_only_the_slots_of_their_tokens(slots: list[int], record: Record) -> None:
    call = _call(record("llama", LENGTH))
    part = call.of_rows([1], torch.tensor(slots))
    assert part.when.batch_rows == (1,)
    assert part.length == 4
    assert torch.equal(part.hidden_states, call.hidden_states[1:, slots])
    assert torch.equal(part.keys, call.keys[1:, :, slots])
    assert torch.equal(part.values, call.values[1:, :, slots])
    assert torch.equal(_weights(part), _weights(call)[1:][:, :, slots][..., slots])
    assert torch.equal(part.queries(), call.queries()[1:, :, slots])
    assert torch.equal(part.queries(2), call.queries()[1:, :, slots[-2:]])
    assert part.key_positions().tolist() == [[slots]]
    assert part.next_position.tolist() == [[LENGTH]]


def test_rows_of_a_decoding_step_keep_what_is_known_of_its_tokens(record: Record) -> None:
    recorded = record("llama", LENGTH)
    call = _call(
        recorded,
        hidden_states=recorded.hidden_states[:, -3:],
        query=recorded.query[:, :, -3:],
        query_is_rotated=True,
        attentions=None,
        position_ids=torch.tensor([[4, 5, 6]]),
    )
    part = call.of_rows([0], torch.tensor([0, 2, 5, 6]))  # of the last three, the first is a hole
    assert part.length == 4
    assert torch.equal(part.hidden_states, recorded.hidden_states[:1, -2:])
    assert torch.equal(part.queries(), recorded.query[:1, :, -2:])
    assert part.position_ids is not None
    assert part.position_ids.tolist() == [[5, 6]]


def test_rows_of_tokens_that_are_left_keep_counting_from_the_forwards_start(
    record: Record,
) -> None:
    recorded = record("llama", LENGTH)
    call = _call(recorded)
    left = torch.tensor([[[2, 3, 6]] * 2, [[0, 4, 6]] * 2])
    left[1, :, 0] = -1  # an empty slot in the second row
    call = call.replace(keys=call.keys[:, :, :3], at=replace(call.at, tokens=left))
    part = call.of_rows([1], torch.tensor([1, 2]))
    assert part.length == 2
    assert torch.equal(part.queries(), recorded.query[1:, :, [4, 6]])
    assert part.attentions is None  # weights over other keys than those that are left
