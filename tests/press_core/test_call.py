"""A call gives a press its queries, and can be narrowed to some of its rows, tokens or keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from experiments.testbed.families import FAMILIES
from press_core import AttentionCall, UnsupportedInputError, attention_sites
from tests.support import build

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
    with pytest.raises(UnsupportedInputError, match=r"Needs\.QUERIES"):
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


def test_nobody_writes_into_a_call(record: Callable[..., Any]) -> None:
    call = _call(record("llama", LENGTH))
    with pytest.raises(FrozenInstanceError):
        call.budget = 3  # type: ignore[misc]


def test_a_budget_holds_for_the_whole_call_alone(record: Callable[..., Any]) -> None:
    call = _call(record("llama", LENGTH))
    budgeted = call.with_budget(3)
    assert (call.budget, budgeted.budget) == (None, 3)
    assert budgeted.keys is call.keys
    positions = torch.tensor([[[0, 3], [1, 6]], [[2, 4], [5, 6]]])
    assert budgeted.select(positions).budget is None
    assert budgeted.chunk(2, 5).budget is None


# ---- some of the keys ----------------------------------------------------------------------------


def test_selecting_keys_leaves_their_values_and_queries(record: Callable[..., Any]) -> None:
    recorded = record("llama", LENGTH)
    call = _call(recorded)
    positions = torch.tensor([[[0, 3, 5], [1, 4, 6]], [[2, 4, 5], [3, 5, 6]]])
    twice = torch.tensor([[[0, 2]] * 2] * 2)
    once, again = call.select(positions), call.select(positions).select(twice)
    for selected, left in ((once, positions), (again, positions[..., [0, 2]])):
        assert selected.length == left.shape[-1]
        assert selected.attentions is None  # weights over other keys than those that are left
        assert selected.key_positions().tolist() == left.tolist()
        for row in range(2):
            for head in range(4):
                kept = left[row, head // 2]
                query = recorded.query[row, head, kept]
                assert torch.equal(selected.queries()[row, head], query)
                assert torch.equal(selected.keys[row, head // 2], call.keys[row, head // 2, kept])
                values = call.values[row, head // 2, kept]
                assert torch.equal(selected.values[row, head // 2], values)


def test_selected_keys_stay_where_they_were_rotated_to(record: Callable[..., Any]) -> None:
    rotated = torch.arange(LENGTH).view(1, 1, -1) + 20
    call = _call(record("llama", LENGTH), rotary_positions=rotated)
    positions = torch.tensor([[[0, 3], [1, 6]], [[2, 4], [5, 6]]])
    assert call.select(positions).key_positions().tolist() == (positions + 20).tolist()


def test_selected_keys_before_rope_are_those_of_the_model(record: Callable[..., Any]) -> None:
    call = _call(record("llama", LENGTH))
    positions = torch.tensor([[[0, 3], [1, 6]], [[2, 4], [5, 6]]])
    whole, selected = call.keys_before_rope(), call.select(positions).keys_before_rope()
    wanted = whole.gather(2, positions.unsqueeze(-1).expand_as(selected))
    torch.testing.assert_close(selected, wanted, atol=1e-5, rtol=1e-4)


def test_a_chunk_is_the_call_over_its_tokens(record: Callable[..., Any]) -> None:
    recorded = record("llama", LENGTH)
    call = _call(recorded, position_ids=None)
    chunk = call.chunk(2, 5)
    assert torch.equal(chunk.keys, call.keys[:, :, 2:5])
    assert torch.equal(chunk.values, call.values[:, :, 2:5])
    assert torch.equal(chunk.hidden_states, call.hidden_states[:, 2:5])
    assert torch.equal(chunk.queries(), recorded.query[:, :, 2:5])
    assert chunk.attentions is not None
    assert torch.equal(chunk.attentions, recorded.weights[:, :, 2:5, 2:5])
    assert chunk.key_positions().tolist() == [[[2, 3, 4]]]
    assert call.chunk(5, 100).length == LENGTH - 5


def test_a_chunk_of_tokens_that_are_left_has_their_queries(record: Callable[..., Any]) -> None:
    recorded = record("llama", LENGTH)
    tokens = torch.tensor([[[0, 2, 5, 6], [1, 2, 3, 6]], [[0, 1, 2, 3], [3, 4, 5, 6]]])
    chunk = _call(recorded, tokens=tokens, keys=recorded.keys[:, :, :4]).chunk(1, 3)
    assert chunk.length == 2
    for row in range(2):
        for head in range(4):
            left = tokens[row, head // 2, 1:3]
            assert torch.equal(chunk.queries()[row, head], recorded.query[row, head, left])


def test_what_is_known_of_tokens_is_aligned_to_keys(record: Callable[..., Any]) -> None:
    recorded = record("llama", LENGTH)
    per_token = torch.arange(LENGTH).expand(2, 2, LENGTH)
    call = _call(recorded)
    assert call.align_to_keys(per_token) is per_token
    tokens = torch.tensor([[[0, 3], [1, 6]], [[2, 4], [5, 6]]])
    assert call.select(tokens).align_to_keys(per_token).tolist() == tokens.tolist()
    decoding = _call(recorded, hidden_states=recorded.hidden_states[:, -2:])
    with pytest.raises(UnsupportedInputError, match=r"7 keys .* those of 2 tokens"):
        decoding.align_to_keys(per_token[..., :2])


# ---- some of the rows ----------------------------------------------------------------------------


def test_all_rows_without_padding_are_the_whole_call(record: Callable[..., Any]) -> None:
    call = _call(record("llama", LENGTH))
    same = call.of_rows([0, 1], None)
    assert same.batch_rows == (0, 1)
    for name in ("hidden_states", "keys", "values", "attentions", "query"):
        assert torch.equal(getattr(same, name), getattr(call, name))


def test_rows_are_taken_of_everything_that_has_them() -> None:
    site = attention_sites(build("llama"))[0]
    keys, scores = torch.randn(4, 2, LENGTH, 16), torch.randn(4, 2, 3)
    ids = torch.arange(4)[:, None] + torch.arange(LENGTH)
    call = AttentionCall(
        site, torch.randn(4, LENGTH, 64), keys, keys, position_ids=ids, recent_scores=scores
    )
    rows = [0, 2]
    part = call.of_rows(rows, torch.arange(2, LENGTH))
    assert torch.equal(part.keys, keys[rows, :, 2:])
    assert torch.equal(part.hidden_states, call.hidden_states[rows, 2:])
    assert part.position_ids is not None
    assert torch.equal(part.position_ids, ids[rows, 2:])
    assert part.recent_scores is not None
    assert torch.equal(part.recent_scores, scores[rows])
    assert part.length == LENGTH - 2


def test_rows_hold_nothing_of_their_padding(record: Callable[..., Any]) -> None:
    call = _call(record("llama", LENGTH))
    whole = call.queries()
    part = call.of_rows([1], torch.arange(3, LENGTH))
    assert part.batch_rows == (1,)
    assert part.length == part.hidden_states.shape[1] == 4
    assert torch.equal(part.hidden_states, call.hidden_states[1:, 3:])
    assert torch.equal(part.values, call.values[1:, :, 3:])
    assert part.attentions is not None
    assert call.attentions is not None
    assert torch.equal(part.attentions, call.attentions[1:, :, 3:, 3:])
    assert torch.equal(part.queries(), whole[1:, :, 3:])
    assert torch.equal(part.queries(2), whole[1:, :, -2:])
    assert part.next_position.tolist() == [[LENGTH]]


def test_rows_hold_nothing_of_holes_between_their_tokens(record: Callable[..., Any]) -> None:
    call = _call(record("llama", LENGTH))
    slots = torch.tensor([1, 2, 4, 6])  # padding on the left, and twice between turns
    part = call.of_rows([1], slots)
    assert part.length == part.hidden_states.shape[1] == 4
    assert torch.equal(part.keys, call.keys[1:, :, slots])
    assert torch.equal(part.queries(), call.queries()[1:, :, slots])
    assert part.attentions is not None
    assert call.attentions is not None
    assert torch.equal(part.attentions, call.attentions[1:][:, :, slots][..., slots])
    assert part.position_ids is not None
    assert part.position_ids.tolist() == [[1, 2, 4, 6]]


def test_rows_of_a_decoding_step_keep_what_is_known_of_its_tokens(
    record: Callable[..., Any],
) -> None:
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
    record: Callable[..., Any],
) -> None:
    recorded = record("llama", LENGTH)
    tokens = torch.tensor([[[2, 3, 6]] * 2, [[-1, 4, 6]] * 2])  # an empty slot in the second row
    call = _call(recorded, tokens=tokens, keys=recorded.keys[:, :, :3])
    part = call.of_rows([1], torch.tensor([1, 2]))
    assert part.length == 2
    assert torch.equal(part.queries(), recorded.query[1:, :, [4, 6]])
    assert part.attentions is None  # weights over other keys than those that are left
