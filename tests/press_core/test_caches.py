"""A pruned layer is a cache layer like any other, and knows what it has seen."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer

from patch_impl import KnormPress
from press_core import PrunedLayer, ScopeError, UnsupportedCacheError, cache_nbytes, kept_lengths
from press_core.cache.caches import check_prunable, known, mask_layer
from press_core.cache.memory import FIRST, Key, Memory, Step
from press_core.cache.pruned import ReadingNeeds, Rerotation
from press_core.cache.storage import Storage
from press_core.cache.tokens import Kept
from tests.support import build, reading

BATCH, HEADS, KEPT, SEEN, DIM = 3, 2, 4, 10, 5
ROWS = [[-1, -1, 6, 9], [-1, 3, 4, 8], [0, 1, 2, 9]]
"""Positions that the rows hold: two slots of the first are empty, one of the second."""
POSITIONS = torch.tensor(ROWS, dtype=torch.int32)[:, None].expand(BATCH, HEADS, KEPT)
CROP_TAKES_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def states(n: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, n, DIM), torch.randn(batch, HEADS, n, DIM)


def holding(keys: Tensor, values: Tensor, kept: Kept) -> PrunedLayer:
    layer = PrunedLayer(Storage(DynamicLayer()).holding(keys, values))
    layer.kept = kept
    return layer


def pruned(n_later: int = 0, needs: ReadingNeeds = ReadingNeeds.NOTHING) -> PrunedLayer:
    """`KEPT` of `SEEN` tokens, and `n_later` that came afterwards."""
    layer = holding(*states(KEPT), Kept(POSITIONS, KEPT, SEEN, rows=(2, 3, 4)))
    if n_later:
        layer.update(*states(n_later))
    layer.needs = needs
    return layer


def rerotated(n_later: int = 0) -> PrunedLayer:
    """As `pruned`, with the kept keys at `0 ... KEPT - 1`; rows lag behind by 0, 2 and 1."""
    layer = pruned(n_later)
    positions = torch.arange(KEPT, dtype=torch.int32).expand(BATCH, HEADS, KEPT)
    layer.rerotation = Rerotation(positions, SEEN - KEPT, (0, 2, 1))
    return layer


def unsaid(keys: Tensor, values: Tensor) -> PrunedLayer:
    """What a press has left that did not say which of `SEEN` tokens those are."""
    return holding(keys, values, Kept(None, keys.shape[2], SEEN))


def cache_of(*layers: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


# ---- what is seen and what is kept ---------------------------------------------------------------


def test_a_pruned_layer_appends_and_counts_what_it_has_seen() -> None:
    layer, (new_keys, new_values) = pruned(), states(3)
    old_keys, old_values = layer.keys, layer.values
    assert (layer.get_seq_length(), layer.n_slots) == (SEEN, KEPT)
    keys, values = layer.update(new_keys, new_values)
    assert torch.equal(keys, torch.cat((old_keys, new_keys), dim=2))
    assert torch.equal(values, torch.cat((old_values, new_values), dim=2))
    assert (layer.get_seq_length(), layer.n_slots) == (SEEN + 3, KEPT + 3)


@pytest.mark.parametrize("query_length", [1, 5])
def test_mask_sizes_are_those_of_the_slots_at_the_end_of_the_sequence(query_length: int) -> None:
    layer = pruned(n_later=2)
    expected = KEPT + 2 + query_length, SEEN - KEPT
    assert layer.get_mask_sizes(query_length) == expected
    positions = torch.arange(SEEN + 2, SEEN + 2 + query_length)  # as transformers 5.2 asks
    assert layer.get_mask_sizes(positions) == expected


@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("need", [need for need in ReadingNeeds if need])
def test_a_layer_in_need_of_help_is_not_updated_without_it(
    need: ReadingNeeds, n_tokens: int
) -> None:
    layer = pruned(needs=need)
    if need is ReadingNeeds.MASK_OF_MANY and n_tokens == 1:
        layer.update(*states(1))
        return
    with pytest.raises(ScopeError, match="keep the scope of the press open"):
        layer.update(*states(n_tokens))
    with reading(pruned()), pytest.raises(ScopeError):  # another layer's help
        layer.update(*states(n_tokens))
    assert layer.get_seq_length() == SEEN
    with reading(layer):
        layer.update(*states(n_tokens))
    assert layer.get_seq_length() == SEEN + n_tokens


def test_a_rerotated_layer_counts_on_from_where_its_keys_are() -> None:
    layer = rerotated(n_later=2)
    assert (layer.n_seen, layer.get_seq_length()) == (SEEN + 2, KEPT + 2)
    assert layer.get_mask_sizes(3) == (KEPT + 2 + 3, 0)
    rotary, positions = layer.all_rotary_positions(), layer.all_positions()
    assert rotary is not None
    assert positions is not None
    for row, lag in enumerate([0, 2, 1]):
        expected = [*range(KEPT), KEPT - lag, KEPT + 1 - lag]
        assert rotary[row].tolist() == [expected] * HEADS
        assert positions[row].tolist() == [[*ROWS[row], SEEN, SEEN + 1]] * HEADS


# ---- crop ----------------------------------------------------------------------------------------


def crop_to(cache_or_layer: Any, length: int) -> None:
    """Crop as the installed transformers is told to."""
    seen = cache_or_layer.get_seq_length()
    cache_or_layer.crop(length if CROP_TAKES_LENGTH else length - seen)


@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("crop", [crop_to, lambda cache, n: cache.crop(n - SEEN - 3)])
def test_crop_takes_away_what_came_after_the_pruning(crop: Any, left: int) -> None:
    if left == 3 and CROP_TAKES_LENGTH and crop is not crop_to:
        pytest.skip("in transformers 5.2 0 means no token at all")
    cache = cache_of(pruned(n_later=3), pruned(n_later=3))
    before = [(layer.keys, layer.values) for layer in cache.layers]
    crop(cache, SEEN + left)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert layer.get_seq_length() == SEEN + left
        assert torch.equal(layer.keys, keys[:, :, : KEPT + left])
        assert torch.equal(layer.values, values[:, :, : KEPT + left])


def test_crop_does_not_reach_into_the_pruned_part() -> None:
    layer = pruned(n_later=3)
    keys = layer.keys
    crops = [lambda n=n: crop_to(layer, n) for n in (SEEN - 1, KEPT, 1)]
    crops += [lambda: layer.crop(-4), *([lambda: layer.crop(0)] if CROP_TAKES_LENGTH else [])]
    for crop in crops:
        with pytest.raises(UnsupportedCacheError, match="3 came after the pruning"):
            crop()
    if CROP_TAKES_LENGTH:
        layer.crop(SEEN + 100)  # to more than was seen
    assert layer.keys is keys
    assert layer.get_seq_length() == SEEN + 3


# ---- what generate does with layers --------------------------------------------------------------


@pytest.mark.parametrize("need", [need for need in ReadingNeeds if need])
def test_reset_forgets_everything(need: ReadingNeeds) -> None:
    layer = rerotated(n_later=3)
    layer.needs, layer.memories = need, {Key(): Memory()}
    layer.carried = {"sinks": torch.zeros(BATCH, HEADS, 1, DIM)}
    layer.reset()
    assert layer.get_seq_length() == layer.n_slots == 0
    assert layer.get_mask_sizes(4) == (4, 0)
    assert [kept.tolist() for kept in kept_lengths(cache_of(layer))] == [[]]
    assert (layer.rerotation, layer.positions) == (None, None)
    assert not layer.memories
    assert not layer.carried
    keys, _ = layer.update(*states(2, batch=1))  # a batch of another size
    assert keys.shape[2] == layer.get_seq_length() == 2
    assert layer.get_mask_sizes(1) == (3, 0)
    assert layer.all_positions().tolist() == [[[0, 1]]]
    assert layer.all_rotary_positions() is None


SELECTING = {
    "reorder": (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "select": (lambda layer: layer.batch_select_indices(torch.tensor([0, 1, 2, 2])), [0, 1, 2, 2]),
    "mask": (lambda layer: layer.batch_select_indices(torch.tensor([False, True, True])), [1, 2]),
    "repeat": (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("how", SELECTING)
def test_rows_are_selected_with_everything_known_of_them(how: str) -> None:
    layer, key = rerotated(n_later=1), Key()
    hidden, received = torch.randn(BATCH, 1, DIM), torch.randn(BATCH, HEADS, KEPT)
    layer.memories = {key: Memory(5, 6, (Step(1, {"hidden": hidden}),), {"received": received})}
    layer.carried = {"sinks": torch.randn(BATCH, HEADS, 1, DIM)}
    layer.kept = Kept(POSITIONS, KEPT, SEEN, (2, 3, 4), torch.rand(BATCH, SEEN) < 0.5)
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


def test_rows_without_positions_are_selected_and_repeated_too() -> None:
    layer = unsaid(*states(KEPT))
    keys = layer.keys
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([5, 0]))
    assert torch.equal(layer.keys, keys[[2, 0]])
    assert layer.positions is None


def pickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_is_a_pruned_layer_of_its_own(copied: Any) -> None:
    layer = pruned(n_later=2)
    other = copied(layer)
    other.update(*states(3))
    assert isinstance(other, PrunedLayer)
    assert (other.get_seq_length(), layer.get_seq_length()) == (SEEN + 5, SEEN + 2)
    assert torch.equal(other.keys[:, :, : KEPT + 2], layer.keys)
    assert other.kept.rows == layer.kept.rows
    other.reset()
    assert torch.equal(layer.positions, POSITIONS)
    assert layer.get_mask_sizes(1) == (KEPT + 3, SEEN - KEPT)


@pytest.mark.parametrize(("backend", "package"), [("quanto", "optimum.quanto"), ("hqq", "hqq")])
@torch.no_grad()
def test_a_pickled_quantized_cache_is_decoded_as_the_one_that_was_pickled(
    backend: str, package: str
) -> None:
    pytest.importorskip(package, reason=f"needs {package}, a back end of QuantizedCache")
    model, ids = build("llama"), torch.arange(3, 43)[None]
    cache = QuantizedCache(backend, model.config, nbits=4, residual_length=6, q_group_size=16)
    with KnormPress(0.5)(model):
        model(ids, past_key_values=cache)
        model(ids[:, :3], past_key_values=cache)  # some wait to be quantized
        other = pickled(cache)
        expected = model(ids[:, :5], past_key_values=cache).logits
        assert torch.equal(model(ids[:, :5], past_key_values=other).logits, expected)
    for one, two in zip(other.layers, cache.layers, strict=True):
        assert (type(one), one.n_slots, one.n_seen) == (PrunedLayer, 20 + 8, 40 + 8)
        assert torch.equal(one.positions, two.positions)


# ---- what a scope remembers ----------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=6),
    st.none() | st.integers(1, 5),
    st.data(),
)
def test_the_last_tokens_are_remembered(
    sizes: list[tuple[int, bool]], limit: int | None, data: st.DataObject
) -> None:
    """So that those of the last forward can be taken back."""
    came, first = [], Memory()
    memory = first
    for n, alike in sizes:  # states may be the same for all rows, as positions are
        step = torch.randn(1 if alike else BATCH, n, DIM)
        came.append(step.expand(BATCH, -1, -1))
        memory = memory.after_forward().with_step(Step(n, {"states": step}), limit)
    assert memory.ticks == FIRST + len(sizes)
    assert (first.ticks, first.steps) == (FIRST, ())  # a value, which nobody has changed
    taken = data.draw(st.integers(0, sizes[-1][0]))
    left = torch.cat(came, dim=1)[:, : sum(n for n, _ in sizes) - taken]
    found = memory.without_last(taken, 0).last(limit)
    expected = left if limit is None else left[:, -limit:]
    assert torch.equal(found["states"].expand_as(expected) if found else left, expected)


@pytest.mark.parametrize("remove", [1, 2, 3])
def test_crop_takes_tokens_out_of_memories_too(remove: int) -> None:
    layer, key = pruned(n_later=3), Key()
    hidden, received = torch.randn(BATCH, 2, DIM), torch.randn(BATCH, HEADS, KEPT + 1)
    layer.memories = {key: Memory(5, 5, (Step(2, {"hidden": hidden}),), {"received": received})}
    layer.crop(-remove)
    memory = layer.memories[key]
    expected = hidden[:, : max(0, 2 - remove)]
    assert torch.equal(memory.last().get("hidden", hidden[:, :0]), expected)
    up_to_date = memory.of_slots(layer.n_slots)["received"]  # nothing of the last two tokens
    assert up_to_date.shape[-1] == layer.n_slots
    assert torch.equal(up_to_date[..., : KEPT + 1], received[..., : KEPT + 3 - remove])
    assert not up_to_date[..., KEPT + 1 :].any()


# ---- what a cache holds --------------------------------------------------------------------------


def test_kept_lengths_count_tokens_and_not_empty_slots() -> None:
    plain = DynamicLayer()
    plain.update(*states(7))
    of_heads = torch.tensor([[[-1, -1, 3], [0, 1, 2]]])
    apart = holding(*states(3, batch=1), Kept(of_heads, 3, 8))
    lengths = kept_lengths(cache_of(pruned(n_later=2), plain, DynamicLayer(), apart))
    assert [kept.dtype for kept in lengths] == [torch.int64] * 4
    assert lengths[0].tolist() == [[2 + 2] * HEADS, [3 + 2] * HEADS, [4 + 2] * HEADS]
    assert lengths[1].tolist() == [[7] * HEADS] * BATCH
    assert lengths[2].shape == (0, 0)
    assert lengths[3].tolist() == [[1, 3]]


def test_bytes_are_those_of_storages_spare_capacity_included_and_each_once() -> None:
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


@pytest.mark.parametrize(("family", "first"), [("llama", 0), ("gemma3_text", 1)])
def test_the_mask_is_built_for_the_first_layer_that_does_not_slide(family: str, first: int) -> None:
    cache = DynamicCache(config=build(family).config)
    assert mask_layer(cache) is cache.layers[first]
    cache.layers[first] = layer = pruned()
    assert mask_layer(cache) is layer


# ---- caches that cannot be pruned ----------------------------------------------------------------


def test_layers_that_hold_all_tokens_are_prunable() -> None:
    config = build("llama").config
    for cache in (DynamicCache(), DynamicCache(config=config)):
        check_prunable(cache, 0)  # whether or not the layer is there yet
        cache.update(*states(2), 0)
        check_prunable(cache, 0)
        assert torch.equal(known(cache, 0).states()[0], cache.layers[0].keys)
    check_prunable(StaticCache(config=config, max_cache_len=16), 0)
    layer = pruned()
    assert known(cache_of(layer), 0) is layer


class OtherLayer(DynamicLayer):
    """Stands for layers whose `keys` are not all they hold."""


@pytest.mark.parametrize("check", [check_prunable, known])
def test_other_caches_are_refused_by_what_they_are(check: Any) -> None:
    sliding = DynamicCache(config=build("gemma3_text").config)
    check(sliding, 1)
    refused = {
        "DynamicSlidingWindowLayer": sliding,
        "OtherLayer": cache_of(OtherLayer()),
        "tuple": ((torch.zeros(1), torch.zeros(1)),),
        "NoneType": None,
    }
    for name, cache in refused.items():
        with pytest.raises(UnsupportedCacheError, match=name):
            check(cache, 0)
