"""Evictions say what is left; of several, positions count in what the first was about."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from press_core import PressError, UnsupportedInputError
from press_core.eviction import Eviction
from tests.press_core.drawn import BATCH, HEADS, KV, KV_HEADS, drawn, drawn_call, site

LENGTH = 9


def _call():
    return drawn_call(LENGTH, attentions=drawn(BATCH, HEADS, LENGTH, LENGTH))


def _positions(*heads):
    """The same for both rows; one list for each KV head, or one for both."""
    return torch.tensor(heads).expand(BATCH, KV_HEADS, -1)


ALL = _positions(list(range(LENGTH)))


def _at(states, positions):
    """`(B, H_kv, n, d)`, one token after the other."""
    rows = [torch.stack([states[row, head, p] for p in positions[row, head]]) for row, head in KV]
    return torch.stack(rows).view(BATCH, KV_HEADS, -1, states.shape[-1])


# ---- the kinds -----------------------------------------------------------------------------------


def test_nothing_leaves_everything():
    call = _call()
    eviction = Eviction.nothing(call)
    keys, values = eviction
    assert (keys is call.keys, values is call.values) == (True, True)
    assert (eviction.length, eviction.is_whole) == (LENGTH, True)
    assert torch.equal(eviction.known_kept, ALL)


@pytest.mark.parametrize("field", ["kept", "call.budget", "call.at.tokens", "call.when.decoding"])
def test_calls_and_evictions_are_values(field):
    *path, name = field.split(".")
    value = Eviction.nothing(_call())
    for part in path:
        value = getattr(value, part)
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, None)


def test_heads_that_differ_keep_their_states_until_they_are_stored():
    call = _call()
    mask, carried = torch.rand(BATCH, KV_HEADS, LENGTH) > 0.5, {"scores": torch.rand(2, 2, 2)}
    eviction = Eviction.keep_per_head(call, mask, carried)
    assert eviction.keys is call.keys
    assert (eviction.head_mask is mask, eviction.carried is carried) == (True, True)
    late = Eviction.late(call, mask[..., :3], carried)
    assert (late.head_mask, late.carried is carried) == (None, True)
    assert torch.equal(late.late_mask, mask[..., :3])
    for found in (eviction, late):
        assert not found.is_whole
        with pytest.raises(UnsupportedInputError, match="Eviction"):
            _, _ = found


def test_states_alone_do_not_say_what_was_kept():
    call = _call()
    eviction = Eviction.of(call, (call.keys[:, :, 1:4], call.values[:, :, 1:4]))
    assert eviction.kept is None
    for use in (lambda: eviction.known_kept, eviction.next_call, eviction.rerotated):
        with pytest.raises(UnsupportedInputError, match=r"Eviction\.keep\("):
            use()


def test_states_of_all_tokens_are_all_tokens():
    call = _call()
    eviction = Eviction.of(call, (2 * call.keys, call.values))
    assert torch.equal(eviction.known_kept, ALL)
    assert not eviction.is_whole, "a press may have changed the states"
    assert torch.equal(eviction.next_call().keys, 2 * call.keys)
    assert Eviction.of(call, eviction) is eviction


def test_what_does_not_fit_the_call_is_refused():
    call = _call()
    k, v = call.keys, call.values
    pairs = (k[:, :, :4], v), (k[:, :1], v), (k[:, :, :0], v[:, :, :0]), (k.int(), v), (k[0], v[0])
    sparse, longer = (k.to_sparse(), v), (k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))
    torn = replace(Eviction.nothing(call), values=v[:, :, 1:])
    for kind, several in (
        (Eviction.of, (None, "kv", k, (k, v, v), torn, sparse, longer, *pairs)),
        (lambda call, states: Eviction.from_states(call, *states), (sparse, longer, *pairs)),
        (Eviction.keep, (ALL[:, :1], ALL[..., :0], ALL.int(), [0, 1])),
        (Eviction.keep, (ALL + 1, ALL - 1, ALL.repeat(1, 1, 2), ALL.flip(-1), ALL // 2)),
        (Eviction.keep_channels, (ALL[:, 0, :2], ALL[..., :2] + k.shape[-1] - 1, None)),
        (Eviction.keep_per_head, (ALL, ALL[..., 1:] > 0, (ALL > 0).to("meta"))),
    ):
        for bad in several:
            with pytest.raises(PressError, match=r"returned|given"):
                kind(call, bad)


# ---- rerotated -----------------------------------------------------------------------------------


def test_rerotating_everything_or_twice_changes_no_key():
    call = _call()
    whole = Eviction.nothing(call).rerotated()
    assert whole.keys is call.keys
    assert whole.next_position == LENGTH
    assert not whole.is_whole, "later positions have to be told from where to continue"
    once = Eviction.keep(call, _positions([0, 3, 8])).rerotated()
    assert torch.equal(once.rerotated().known_kept, once.known_kept)
    torch.testing.assert_close(once.rerotated().keys, once.keys)


# ---- one after the other -------------------------------------------------------------------------


def _then(first, positions, rerotate=False):
    left = first.next_call()
    is_all = positions.shape[-1] == left.length
    later = Eviction.nothing(left) if is_all else Eviction.keep(left, positions)
    return first.then(later.rerotated() if rerotate else later)


def test_rerotating_a_whole_context_at_other_positions_rotates_its_keys():
    ids = torch.arange(LENGTH)[None] + 7
    there = site().rotary.embeddings(torch.zeros(1).double(), ids)
    call = drawn_call(LENGTH, position_ids=ids, position_embeddings=there)
    before = site().rotary.rotate_from(call.keys, ids[None])
    expected = site().rotary.rotate_to(before, torch.arange(LENGTH).view(1, 1, -1))
    torch.testing.assert_close(Eviction.nothing(call).rerotated().keys, expected)


def test_what_the_first_did_not_say_the_second_cannot_tell():
    call = _call()
    first = Eviction.keep(call, _positions([0, 3, 5, 8]))
    left = first.next_call()
    both = first.then(Eviction.from_states(left, left.keys[:, :, :2], left.values[:, :, :2]))
    assert both.kept is None
    assert both.length == 2


@st.composite
def _steps(draw):
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


@settings(max_examples=40)
@given(_steps())
def test_evictions_may_be_nested_in_any_way(steps):
    """`(a, b), c` is `a, (b, c)`, and both are the positions taken step by step."""
    call = _call().with_budget(3)
    nothing = Eviction.nothing(call)
    from_left = _then(_then(_then(nothing, *steps[0]), *steps[1]), *steps[2])
    first = _then(nothing, *steps[0])
    second = _then(Eviction.nothing(first.next_call()), *steps[1])
    from_right = first.then(_then(second, *steps[2]))

    kept, rotary, following = ALL, None, None
    for positions, rerotate in steps:
        kept = kept.gather(-1, positions)
        rotary = None if rotary is None else rotary.gather(-1, positions)
        if rerotate:
            following = positions.shape[-1]
            rotary = _positions(list(range(following)))
    keys, is_whole = _at(call.keys, kept), torch.equal(kept, ALL) and rotary is None
    rotated_at = kept if rotary is None else rotary
    if rotary is not None:  # as far as they are rerotated, keys of a context of tokens alone
        keys = site().rotary.rotate_to(site().rotary.rotate_from(keys, kept), rotary)
    for eviction in (from_left, from_right):
        after = eviction.next_call()
        assert eviction.call is call
        assert (eviction.length, eviction.is_whole) == (kept.shape[-1], is_whole)
        assert torch.equal(eviction.known_kept, kept)
        assert torch.equal(eviction.values, _at(call.values, kept))
        assert eviction.next_position == following
        assert (eviction.rotary_positions is None) == (rotary is None)
        assert torch.equal(after.key_positions().expand_as(kept), rotated_at)
        assert after.budget is None, "of another press"
        assert after.attentions is (call.attentions if is_whole else None)
        if rotary is None:
            assert torch.equal(eviction.keys, keys)
        for found in (eviction.keys, after.keys):
            torch.testing.assert_close(found, keys, atol=1e-9, rtol=1e-9)
        if not is_whole:
            assert torch.equal(after.at.tokens, kept)


def test_heads_that_differ_come_last_and_count_in_the_first_call():
    call = _call()
    first = Eviction.keep(call, _positions([0, 3, 5, 8], [1, 2, 4, 6]))
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]]).expand(2, 2, 4)
    both = first.then(Eviction.keep_per_head(first.next_call(), mask))
    assert both.head_mask is mask
    assert torch.equal(both.known_kept, first.known_kept)
