"""Evictions say what is left; of several, positions count in what the first was about."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from press_core import AttentionCall, UnsupportedInputError, attention_sites
from press_core.eviction import Eviction
from press_core.model.rotary import Rotary
from tests.support import build

BATCH, KV_HEADS, LENGTH, DIM, WIDTH = 2, 2, 9, 16, 64
SITE = attention_sites(build("llama", num_layers=1))[0]


def _rotary() -> Rotary:
    assert SITE.rotary is not None
    return SITE.rotary


def _call(length: int = LENGTH) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    positions = torch.arange(length)[None]
    return AttentionCall(
        site=SITE,
        hidden_states=draw(BATCH, length, WIDTH),
        keys=draw(BATCH, KV_HEADS, length, DIM),
        values=draw(BATCH, KV_HEADS, length, DIM),
        attentions=draw(BATCH, 4, length, length),
        position_embeddings=_rotary().embeddings(torch.zeros(1).double(), positions),
        position_ids=positions,
        query=draw(BATCH, 4, length, DIM),
        query_is_rotated=True,
    )


def _positions(*heads: list[int]) -> Tensor:
    """The same for both rows; one list for each KV head, or one for both."""
    return torch.tensor(heads).expand(BATCH, KV_HEADS, -1)


def _at(states: Tensor, positions: Tensor) -> Tensor:
    """`(B, H_kv, n, d)`, one token after the other."""
    rows = [
        torch.stack([states[row, head, p] for p in positions[row, head]])
        for row in range(BATCH)
        for head in range(KV_HEADS)
    ]
    return torch.stack(rows).view(BATCH, KV_HEADS, -1, states.shape[-1])


def _rerotated(call: AttentionCall, positions: Tensor) -> Tensor:
    """Keys of a fresh prefill rotated from where they are to `0 ... n - 1`, token by token."""
    found = _at(call.keys, positions)
    for row in range(BATCH):
        for head in range(KV_HEADS):
            for slot, position in enumerate(positions[row, head].tolist()):
                key = found[row : row + 1, head : head + 1, slot : slot + 1]
                key = _rotary().rotate_from(key, torch.tensor([[[position]]]))
                found[row, head, slot] = _rotary().rotate_to(key, torch.tensor([[[slot]]]))
    return found


# ---- the kinds -----------------------------------------------------------------------------------


def test_nothing_leaves_everything() -> None:
    call = _call()
    eviction = Eviction.nothing(call)
    keys, values = eviction
    assert (keys is call.keys, values is call.values) == (True, True)
    assert eviction.is_whole
    assert eviction.length == LENGTH
    assert torch.equal(eviction.known_kept, _positions(list(range(LENGTH))))


def test_an_eviction_is_a_value() -> None:
    with pytest.raises(FrozenInstanceError):
        Eviction.nothing(_call()).kept = None  # type: ignore[misc]


def test_keeping_gathers_what_each_head_keeps() -> None:
    call, positions = _call(), _positions([0, 3, 8], [1, 2, 6])
    keys, values = eviction = Eviction.keep(call, positions)
    assert torch.equal(keys, _at(call.keys, positions))
    assert torch.equal(values, _at(call.values, positions))
    assert eviction.known_kept is positions
    assert (eviction.length, eviction.is_whole) == (3, False)


def test_heads_that_differ_keep_their_states_until_they_are_stored() -> None:
    call = _call()
    mask, scores = torch.rand(BATCH, KV_HEADS, LENGTH) > 0.5, torch.rand(BATCH, KV_HEADS, 2)
    eviction = Eviction.keep_per_head(call, mask, scores)
    assert eviction.keys is call.keys
    assert eviction.head_mask is mask
    assert eviction.recent_scores is scores
    assert not eviction.is_whole


def test_channels_are_taken_out_of_the_keys_alone() -> None:
    call, channels = _call(), _positions([0, 5, 15], [2, 3, 4])
    eviction = Eviction.keep_channels(call, channels)
    for head in range(KV_HEADS):
        wanted = call.keys[:, head][..., channels[0, head]]
        assert torch.equal(eviction.keys[:, head], wanted)
    assert eviction.values is call.values
    assert torch.equal(eviction.known_kept, _positions(list(range(LENGTH))))
    assert not eviction.is_whole


def test_tokens_judged_late_are_said_beside_the_new_ones() -> None:
    call = _call()
    mask, scores = torch.ones(BATCH, KV_HEADS, 3).bool(), torch.rand(BATCH, KV_HEADS, 2)
    eviction = Eviction.late(call, mask, scores)
    assert (eviction.late_mask is mask, eviction.recent_scores is scores) == (True, True)
    assert eviction.head_mask is None


def test_states_alone_do_not_say_what_was_kept() -> None:
    call = _call()
    eviction = Eviction.of(call, (call.keys[:, :, 1:4], call.values[:, :, 1:4]))
    assert eviction.kept is None
    for use in (lambda: eviction.known_kept, eviction.next_call, eviction.rerotated):
        with pytest.raises(UnsupportedInputError, match=r"Eviction\.keep\(call, positions\)"):
            use()


def test_states_of_all_tokens_are_all_tokens() -> None:
    call = _call()
    eviction = Eviction.of(call, (2 * call.keys, call.values))
    assert torch.equal(eviction.known_kept, _positions(list(range(LENGTH))))
    assert not eviction.is_whole, "a press may have changed the states"
    assert torch.equal(eviction.next_call().keys, 2 * call.keys)


def test_what_is_an_eviction_already_is_taken_as_it_is() -> None:
    call = _call()
    eviction = Eviction.nothing(call)
    assert Eviction.of(call, eviction) is eviction


# ---- the next call -------------------------------------------------------------------------------


def test_the_next_press_sees_what_is_left_and_no_budget_of_another() -> None:
    call, positions = _call().with_budget(3), _positions([0, 3, 8], [1, 2, 6])
    after = Eviction.keep(call, positions).next_call()
    assert torch.equal(after.keys, _at(call.keys, positions))
    assert torch.equal(after.key_positions(), positions)
    assert (after.budget, after.attentions) == (None, None)
    whole = Eviction.nothing(call).next_call()
    assert (whole.budget, whole.attentions) == (None, call.attentions)


def test_the_next_press_sees_where_keys_were_rerotated_to() -> None:
    positions = _positions([0, 3, 8], [1, 2, 6])
    after = Eviction.keep(_call(), positions).rerotated().next_call()
    assert torch.equal(after.key_positions(), _positions([0, 1, 2]))
    assert after.tokens is not None
    assert torch.equal(after.tokens, positions)


# ---- rerotated -----------------------------------------------------------------------------------


def test_rerotated_keys_are_those_of_a_shorter_context() -> None:
    call, positions = _call(), _positions([0, 3, 8], [1, 2, 6])
    eviction = Eviction.keep(call, positions).rerotated()
    torch.testing.assert_close(eviction.keys, _rerotated(call, positions))
    assert torch.equal(eviction.values, _at(call.values, positions))
    assert torch.equal(eviction.known_kept, positions)
    assert eviction.rotary_positions is not None
    assert torch.equal(eviction.rotary_positions, _positions([0, 1, 2]))
    assert eviction.next_position == 3


def test_rerotating_everything_or_twice_changes_no_key() -> None:
    call = _call()
    whole = Eviction.nothing(call).rerotated()
    assert whole.keys is call.keys
    assert whole.next_position == LENGTH
    assert not whole.is_whole, "later positions have to be told from where to continue"
    once = Eviction.keep(call, _positions([0, 3, 8])).rerotated()
    assert torch.equal(once.rerotated().known_kept, once.known_kept)
    torch.testing.assert_close(once.rerotated().keys, once.keys)


# ---- one after the other -------------------------------------------------------------------------


def _then(first: Eviction, positions: Tensor, rerotate: bool = False) -> Eviction:
    later = Eviction.keep(first.next_call(), positions)
    return first.then(later.rerotated() if rerotate else later)


def test_positions_of_a_later_eviction_count_in_the_first_call() -> None:
    call = _call()
    first = Eviction.keep(call, _positions([0, 3, 5, 8], [1, 2, 4, 6]))
    both = _then(first, _positions([1, 3], [0, 2]))
    expected = _positions([3, 8], [1, 4])
    assert both.call is call
    assert torch.equal(both.known_kept, expected)
    assert torch.equal(both.keys, _at(call.keys, expected))
    assert torch.equal(both.values, _at(call.values, expected))
    assert both.rotary_positions is None
    assert not both.is_whole


def test_nothing_before_or_after_changes_nothing() -> None:
    call, positions = _call(), _positions([0, 3, 8], [1, 2, 6])
    nothing, kept = Eviction.nothing(call), Eviction.keep(call, positions)
    for eviction in (_then(nothing, positions), kept.then(Eviction.nothing(kept.next_call()))):
        assert torch.equal(eviction.known_kept, positions)
        assert torch.equal(eviction.keys, kept.keys)
        assert not eviction.is_whole
    assert nothing.then(Eviction.nothing(nothing.next_call())).is_whole


def test_rerotated_positions_follow_what_a_later_press_keeps() -> None:
    call = _call()
    first = Eviction.keep(call, _positions([0, 3, 5, 8], [1, 2, 4, 6])).rerotated()
    both = _then(first, _positions([1, 3], [0, 2]))
    assert torch.equal(both.known_kept, _positions([3, 8], [1, 4]))
    assert both.rotary_positions is not None
    assert torch.equal(both.rotary_positions, _positions([1, 3], [0, 2]))
    assert both.next_position == 4, "later tokens continue behind what the first had left"
    assert torch.equal(both.keys, _at(first.keys, _positions([1, 3], [0, 2])))


def test_rerotating_after_pruning_starts_from_where_keys_were() -> None:
    call = _call()
    both = _then(Eviction.keep(call, _positions([2, 3, 5, 8])), _positions([1, 3]), rerotate=True)
    expected = _positions([3, 8])
    assert torch.equal(both.known_kept, expected)
    torch.testing.assert_close(both.keys, _rerotated(call, expected))
    assert both.next_position == 2


def test_rerotating_all_that_another_press_has_left_rotates_its_keys() -> None:
    call, positions = _call(), _positions([2, 3, 5, 8], [1, 2, 4, 6])
    first = Eviction.keep(call, positions)
    both = first.then(Eviction.nothing(first.next_call()).rerotated())
    torch.testing.assert_close(both.keys, _rerotated(call, positions))
    assert torch.equal(both.known_kept, positions)
    assert both.next_position == 4


def test_rerotating_a_whole_context_at_other_positions_rotates_its_keys() -> None:
    ids = torch.arange(LENGTH)[None] + 7
    call = replace(
        _call(),
        position_ids=ids,
        position_embeddings=_rotary().embeddings(torch.zeros(1).double(), ids),
    )
    keys = Eviction.nothing(call).rerotated().keys
    before = _rotary().rotate_from(call.keys, ids[None])
    expected = _rotary().rotate_to(before, torch.arange(LENGTH).view(1, 1, -1))
    torch.testing.assert_close(keys, expected)


def test_what_the_first_did_not_say_the_second_cannot_tell() -> None:
    call = _call()
    first = Eviction.keep(call, _positions([0, 3, 5, 8]))
    left = first.next_call()
    both = first.then(Eviction.from_states(left, left.keys[:, :, :2], left.values[:, :, :2]))
    assert both.kept is None
    assert both.length == 2


@st.composite
def _steps(draw: Any) -> list[tuple[Tensor, bool]]:
    """Evictions one after the other: what each head keeps of what is left; whether to rerotate."""
    length, steps = LENGTH, []
    for _ in range(3):
        n = draw(st.integers(1, length))
        heads = [
            sorted(draw(st.lists(st.integers(0, length - 1), min_size=n, max_size=n, unique=True)))
            for _ in range(KV_HEADS)
        ]
        steps.append((_positions(*heads), draw(st.booleans())))
        length = n
    return steps


@settings(deadline=None, max_examples=40)
@given(_steps())
def test_evictions_may_be_nested_in_any_way(steps: list[tuple[Tensor, bool]]) -> None:
    """`(a, b), c` is `a, (b, c)`, and both are the positions taken step by step."""
    first = Eviction.keep(_call(), steps[0][0])
    first = first.rerotated() if steps[0][1] else first
    from_left = _then(_then(first, *steps[1]), *steps[2])
    second = Eviction.keep(first.next_call(), steps[1][0])
    second = second.rerotated() if steps[1][1] else second
    from_right = first.then(_then(second, *steps[2]))

    kept = steps[0][0].gather(-1, steps[1][0]).gather(-1, steps[2][0])
    for eviction in (from_left, from_right):
        assert torch.equal(eviction.known_kept, kept)
        torch.testing.assert_close(eviction.keys, from_left.keys, atol=1e-9, rtol=1e-9)
        assert torch.equal(eviction.values, _at(_call().values, kept))
        assert eviction.next_position == from_left.next_position
        if from_left.rotary_positions is None:
            assert eviction.rotary_positions is None
        else:
            assert eviction.rotary_positions is not None
            assert torch.equal(eviction.rotary_positions, from_left.rotary_positions)
    if steps[2][1]:  # rerotated last: the keys of a context of these tokens alone
        torch.testing.assert_close(from_left.keys, _rerotated(_call(), kept))


def test_heads_that_differ_come_last_and_count_in_the_first_call() -> None:
    call = _call()
    first = Eviction.keep(call, _positions([0, 3, 5, 8], [1, 2, 4, 6]))
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]]).expand(2, 2, 4)
    both = first.then(Eviction.keep_per_head(first.next_call(), mask))
    assert both.head_mask is mask
    assert torch.equal(both.known_kept, first.known_kept)


def test_what_was_decided_stays_when_others_build_on_it() -> None:
    first = Eviction.keep(_call(), _positions([0, 3, 5, 8]))
    before = replace(first)
    _then(first, _positions([1, 3]), rerotate=True)
    for name in ("keys", "values", "kept", "rotary_positions", "next_position", "is_whole"):
        assert getattr(first, name) is getattr(before, name)
