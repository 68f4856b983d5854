"""What a pruned layer knows beside its tokens; `test_layers.py` has those."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from press_core import PrunedLayer, ScopeError, UnsupportedCacheError, cache_nbytes
from press_core.cache.memory import FIRST, Key, Memory, Step
from press_core.cache.pruned import ReadingNeeds
from press_core.cache.tokens import Kept
from tests.support import both, build, reading, update

BATCH, HEADS, KEPT, SEEN, DIM = 3, 2, 4, 10, 5
ROWS = [[-1, -1, 6, 9], [-1, 3, 4, 8], [0, 1, 2, 9]]
"""Positions that the rows hold: two slots of the first are empty, one of the second."""
POSITIONS = torch.tensor(ROWS, dtype=torch.int32)[:, None].expand(BATCH, HEADS, KEPT)


def states(n, batch=BATCH):
    return torch.randn(batch, HEADS, n, DIM), torch.randn(batch, HEADS, n, DIM)


def holding(keys, values, kept):
    layer = PrunedLayer(DynamicLayer()).holding(keys, values)
    layer.kept = kept
    return layer


def pruned(n_later=0, needs=ReadingNeeds.NOTHING):
    """`KEPT` of `SEEN` tokens, and `n_later` that came afterwards."""
    layer = holding(*states(KEPT), Kept(POSITIONS, KEPT, SEEN, rows=(2, 3, 4)))
    if n_later:
        layer.update(*states(n_later))
    layer.needs = needs
    return layer


def unsaid(keys, values):
    """What a press has left that did not say which of `SEEN` tokens those are."""
    return holding(keys, values, Kept(None, keys.shape[2], SEEN))


def cache_of(*layers):
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


# ---- how it is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("need", [need for need in ReadingNeeds if need])
def test_a_layer_in_need_of_help_is_not_updated_without_it(need, n_tokens):
    layer = pruned(needs=need)
    if need is ReadingNeeds.MASK_OF_MANY and n_tokens == 1:
        layer.update(*states(1))
        return
    with pytest.raises(ScopeError, match="keep the scope"):
        layer.update(*states(n_tokens))
    with reading(pruned()), pytest.raises(ScopeError):  # another layer's help
        layer.update(*states(n_tokens))
    assert layer.get_seq_length() == SEEN
    update(layer, *states(n_tokens))
    assert layer.get_seq_length() == SEEN + n_tokens


# ---- what generate does with layers --------------------------------------------------------------


SELECTING = {
    "reorder": (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "select": (lambda layer: layer.batch_select_indices(torch.tensor([0, 1, 2, 2])), [0, 1, 2, 2]),
    "mask": (lambda layer: layer.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
    "repeat": (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("how", SELECTING)
def test_rows_are_selected_with_everything_known_of_them(how):
    layer, key = pruned(n_later=1), Key()
    turned = torch.arange(KEPT, dtype=torch.int32).expand(BATCH, HEADS, KEPT)
    hidden, received = torch.randn(BATCH, 1, DIM), torch.randn(BATCH, HEADS, KEPT)
    layer.remember(key, Memory(5, 6, (Step(1, {"hidden": hidden}),), {"received": received}))
    layer.carried = {"sinks": torch.randn(BATCH, HEADS, 1, DIM)}
    real, following = torch.rand(BATCH, SEEN) < 0.5, (4, 2, 3)  # rows lag behind the first
    layer.kept = Kept(POSITIONS, KEPT, SEEN, (2, 3, 4), real, turned, following, SEEN - KEPT)
    before = copy.deepcopy(layer)
    select, rows = SELECTING[how]
    select(layer)
    assert (layer.get_seq_length(), layer.batch) == (before.get_seq_length(), len(rows))
    assert layer.kept.rows == tuple(before.kept.rows[row] for row in rows)
    for of in (
        lambda layer: layer.keys,
        lambda layer: layer.values,
        lambda layer: layer.positions,
        lambda layer: layer.kept.real,
        lambda layer: layer.kept.occupied(torch.device("cpu")),
        lambda layer: layer.all_positions(),
        lambda layer: layer.all_rotary_positions(),
        lambda layer: layer.carried["sinks"],
        lambda layer: layer.memories[key].last()["hidden"],
        lambda layer: layer.memories[key].slots["received"],
    ):
        assert torch.equal(of(layer), of(before)[rows])
    assert (layer.memories[key].ticks, layer.memories[key].all_ticks) == (5, 6)


# ---- what a scope remembers ----------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=6),
    st.none() | st.integers(1, 5),
    st.data(),
)
def test_the_last_tokens_are_remembered(sizes, limit, data):
    """So that those of the last forward can be taken back."""
    came, first = [], Memory()
    memory = first
    for n, alike in sizes:  # states may be the same for all rows, as positions are
        step = torch.randn(1 if alike else BATCH, n, DIM)
        came.append(step.expand(BATCH, -1, -1))
        memory = memory.after_forward().with_step(Step(n, {"states": step}), limit)
    assert memory.ticks == FIRST + len(sizes)
    # Behind a chunked prefill that was broken off, steps are counted like any others.
    assert Memory(9, in_prefill=True).after_pruning({}, by_this_scope=True).ticks == FIRST
    assert (first.ticks, first.steps) == (FIRST, ())  # a value, which nobody has changed
    taken = data.draw(st.integers(0, sizes[-1][0]))
    left = torch.cat(came, dim=1)[:, : sum(n for n, _ in sizes) - taken]
    found = memory.without_last(taken).last(limit)
    expected = left if limit is None else left[:, -limit:]
    assert torch.equal(found["states"].expand_as(expected) if found else left, expected)


# ---- what a cache holds --------------------------------------------------------------------------


def test_bytes_are_those_of_storages_spare_capacity_included_and_each_once():
    cache = DynamicCache()
    for layer in range(3):
        cache.update(*states(7), layer)
    assert cache_nbytes(cache) == 3 * 2 * BATCH * HEADS * 7 * DIM * 4
    assert cache_nbytes(DynamicCache()) == cache_nbytes(cache_of(DynamicLayer())) == 0
    room, values = torch.zeros(1, HEADS, 100, DIM), torch.zeros(1, HEADS, 6, DIM)
    assert cache_nbytes(cache_of(unsaid(room[:, :, :6], values))) == HEADS * (100 + 6) * DIM * 4
    both = torch.zeros(2, 1, HEADS, 6, DIM, dtype=torch.bfloat16)
    shared = cache_of(*[unsaid(both[0], both[1]) for _ in range(2)])
    assert cache_nbytes(shared) == 2 * HEADS * 6 * DIM * 2


class OtherLayer(DynamicLayer):
    """Stands for layers whose `keys` are not all they hold."""


@both
def test_other_layers_are_refused_by_what_they_are(package):
    model, cache = build("llama"), cache_of(OtherLayer(), OtherLayer())
    with package.KnormPress(0.5)(model), pytest.raises(UnsupportedCacheError, match="OtherLayer"):
        model(torch.arange(3, 23)[None], past_key_values=cache)
