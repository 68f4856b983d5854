"""A call gives a press its queries, and can be narrowed to some of its rows, tokens or keys."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import patch_impl
from experiments.testbed.families import FAMILIES
from press_core import UnsupportedInputError
from tests.press_core.drawn import of_family
from tests.press_core.recorded import record

LENGTH = 7


def _as_patched(recorded, **fields):
    positions = torch.arange(recorded.keys.shape[2])[None]
    known = {"attentions": recorded.weights, "position_ids": positions}
    return of_family(recorded, **{**known, **fields})


def _call(recorded, **fields):
    """As hooks make it."""
    known = {"query": recorded.collected[0], "query_is_rotated": False}
    return _as_patched(recorded, **{**known, **fields})


@pytest.mark.parametrize(  # with as many tokens as heads, the shape does not tell the layout
    ("length", "last"), [(LENGTH, None), (LENGTH, 3), (4, None)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_have_the_models_bits_whichever_way_they_came(family, dtype, length, last):
    recorded = record(family, length, dtype)
    wanted = recorded.query[:, :, -(last or length) :]
    for call in (_call(recorded), _as_patched(recorded)):
        queries = call.queries(last)
        assert queries.is_contiguous()
        assert torch.equal(queries, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_before_rope_agree_bit_for_bit_and_are_those_of_the_model(family):
    recorded = record(family, LENGTH)
    by_hook = _call(recorded).queries_before_rope()
    assert torch.equal(by_hook, _as_patched(recorded).queries_before_rope())
    torch.testing.assert_close(by_hook, recorded.collected[0], atol=1e-5, rtol=1e-4)
    half = _as_patched(record(family, LENGTH, torch.bfloat16))
    assert half.queries_before_rope().dtype == torch.float32


def test_what_nobody_collected_or_prepared_is_missed_by_name():
    call = _call(record("llama", LENGTH), query=None)
    with pytest.raises(UnsupportedInputError, match=r"Needs\.QUERIES"):
        call.queries()
    with pytest.raises(UnsupportedInputError, match=r"QFilterPress.*scope"):
        call.prepared(patch_impl.QFilterPress(0.5))


# ---- some of the rows, tokens or keys ------------------------------------------------------------


def test_a_chunk_has_the_hidden_states_of_its_new_tokens():
    whole = record("llama", LENGTH).hidden_states
    call = _call(record("llama", LENGTH), hidden_states=whole[:, 3:])  # 3 were in the cache
    for start, stop in ((0, 2), (2, 5)):
        assert torch.equal(call.chunk(start, stop).hidden_states, whole[:, 3:stop])


@given(data=st.data())
@settings(max_examples=80)
def test_narrowed_calls_are_about_what_is_left(data):
    """`select`, `chunk` and `of_rows` one after the other, against positions that are tracked."""
    recorded = record("llama", LENGTH)
    rows, tokens, selected, budget = torch.arange(2), torch.arange(LENGTH), False, 3
    left = tokens.expand(2, 2, -1)  # by row and KV head, positions of the keys
    ids, begins = tokens + torch.tensor([[0], [50]]), torch.tensor([0, 50])
    call = _call(recorded, position_ids=ids, memory={"at": left}, carried={"row": rows})
    whole = call = call.replace(when=replace(call.when, seen=(7, 6))).with_budget(budget)
    for how in data.draw(st.lists(st.sampled_from(["select", "chunk", "of_rows"]), max_size=3)):
        n = call.length
        some = torch.tensor(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
        if how == "select":
            positions = torch.stack((some, n - 1 - some.flip(0))).expand(len(rows), -1, -1)
            call, left = call.select(positions), left.gather(-1, positions)
            selected, budget = True, None
            continue
        if how == "of_rows":
            row = st.integers(0, len(rows) - 1)
            chosen = data.draw(st.lists(row, min_size=1, max_size=2, unique=True))
            call, rows, left = call.of_rows(chosen, some), rows[chosen], left[chosen]
            assert call.when.batch_rows == tuple(chosen)
        else:
            some = torch.arange(n)[some[0] : some[-1] + 1]
            end = int(some[-1]) + 1
            call, budget = call.chunk(int(some[0]), end if end < n else n + 5), None
        left = left[..., some]
        tokens = tokens if selected else tokens[some]

    assert (call.budget, call.when.seen) == (budget, tuple((7, 6)[row] for row in rows))
    assert torch.equal(call.carried["row"], rows)
    assert torch.equal(call.memory["at"], left)
    assert torch.equal(call.align_to_keys(tokens.expand(*left.shape[:2], -1)), left)
    assert torch.equal(call.hidden_states, recorded.hidden_states[rows][:, tokens])
    assert torch.equal(call.key_positions().expand_as(left), left + begins[rows].view(-1, 1, 1))
    assert call.next_position.flatten().tolist() == (tokens[-1] + 1 + begins[rows]).tolist()
    if budget is None:  # weights over other keys than those that are left
        assert call.attentions is None
    else:
        assert torch.equal(call.attentions, recorded.weights[rows][:, :, tokens][..., tokens])
    of_heads = left.repeat_interleave(2, dim=1)  # two query heads to a KV head
    before_rope = recorded.collected[0]
    for found, of_all, positions, atol in (
        (call.keys, recorded.keys, left, 0),
        (call.values, recorded.values, left, 0),
        (call.queries(), recorded.query, of_heads, 0),
        (call.queries(1), recorded.query, of_heads[..., -1:], 0),
        (call.queries_before_rope(), before_rope, of_heads, 1e-5),
        (call.keys_before_rope(), whole.keys_before_rope(), left, 1e-5),
    ):
        wanted = of_all[rows].gather(2, positions[..., None].expand(-1, -1, -1, 16))
        torch.testing.assert_close(found, wanted, atol=atol, rtol=10 * atol)


def test_what_is_known_of_some_tokens_is_not_aligned_to_all_keys():
    recorded = record("llama", LENGTH)
    decoding = _call(recorded, hidden_states=recorded.hidden_states[:, -2:])
    with pytest.raises(UnsupportedInputError, match=r"7 keys.* 2 tokens"):
        decoding.align_to_keys(torch.zeros(2, 2, 2))


def test_positions_that_a_model_does_not_tell_count_from_zero():
    recorded = record("llama", LENGTH)
    call = _call(recorded, position_ids=None)
    assert call.next_position.tolist() == [[LENGTH]]
    assert call.chunk(2, 5).key_positions().tolist() == [[[2, 3, 4]]]
    step, rotary = call.hidden_states[:, -1:], torch.arange(LENGTH)[None, None]
    decoding = _call(recorded, hidden_states=step, position_ids=None, rotary_positions=rotary)
    assert decoding.next_position.tolist() == [[LENGTH]]
