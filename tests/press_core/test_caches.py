"""A pruned layer is a cache layer like any other, and knows what it has seen."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer

from patch_impl import KnormPress
from press_core import (
    AttentionCall,
    Eviction,
    PrunedLayer,
    ScopeError,
    UnsupportedCacheError,
    cache_nbytes,
    kept_lengths,
)
from press_core.cache.caches import check_prunable, mask_layer, prunable_layer
from press_core.cache.pruned import (
    ChannelPrunedLayer,
    KeptTokens,
    ReadingNeeds,
    Rerotation,
    ScopeMemory,
    Sinks,
    filled,
)
from press_core.cache.recent import RecentStates
from tests.support import build

BATCH, HEADS, KEPT, SEEN, DIM = 3, 2, 4, 10, 5
CROP_TAKES_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def _states(n: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, n, DIM), torch.randn(batch, HEADS, n, DIM)


def _positions() -> Tensor:
    """Two slots of the first row are empty, one of the second."""
    rows = [[-1, -1, 6, 9], [-1, 3, 4, 8], [0, 1, 2, 9]]
    return torch.tensor(rows)[:, None].expand(BATCH, HEADS, KEPT)


@dataclass
class Reader:
    """Stands for a scope that helps with reading."""

    is_open: bool = True


def _holding(keys: Tensor, values: Tensor, kept: KeptTokens) -> PrunedLayer:
    layer = PrunedLayer(filled(DynamicLayer(), keys, values))
    layer.kept = kept
    return layer


def _pruned(n_later: int = 0, needs: ReadingNeeds = ReadingNeeds.NOTHING) -> PrunedLayer:
    """`KEPT` of `SEEN` tokens, and `n_later` that came afterwards."""
    layer = _holding(*_states(KEPT), KeptTokens(_positions().to(torch.int32), KEPT, SEEN))
    layer.needs = needs
    if n_later:
        layer.update(*_states(n_later))
    return layer


def _unsaid(keys: Tensor, values: Tensor) -> PrunedLayer:
    """What a press has left that did not say which of `SEEN` tokens those are."""
    return _holding(keys, values, KeptTokens(None, keys.shape[2], SEEN))


def _cache(*layers: DynamicLayer) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


# ---- what is seen and what is kept ---------------------------------------------------------------


def test_a_pruned_layer_counts_what_it_has_seen() -> None:
    layer = _pruned()
    assert layer.get_seq_length() == SEEN
    assert layer.n_slots == KEPT
    layer.update(*_states(3))
    assert layer.get_seq_length() == SEEN + 3
    assert layer.n_slots == KEPT + 3
    assert layer.keys.shape == layer.values.shape == (BATCH, HEADS, KEPT + 3, DIM)


def test_later_tokens_are_appended_and_given_back_with_the_kept_ones() -> None:
    layer, (new_keys, new_values) = _pruned(), _states(3)
    old_keys, old_values = layer.keys, layer.values
    keys, values = layer.update(new_keys, new_values)
    assert torch.equal(keys, torch.cat((old_keys, new_keys), dim=2))
    assert torch.equal(values, torch.cat((old_values, new_values), dim=2))


def test_a_new_layer_has_seen_nothing() -> None:
    layer = PrunedLayer(DynamicLayer())
    assert layer.get_seq_length() == 0
    assert layer.n_slots == 0
    layer.update(*_states(3))
    assert layer.get_seq_length() == layer.n_slots == 3


@pytest.mark.parametrize("query_length", [1, 5])
def test_mask_sizes_are_those_of_the_slots_at_the_end_of_the_sequence(query_length: int) -> None:
    layer = _pruned(n_later=2)
    expected = KEPT + 2 + query_length, SEEN - KEPT
    assert layer.get_mask_sizes(query_length) == expected
    positions = torch.arange(SEEN + 2, SEEN + 2 + query_length)  # as transformers 5.2 asks
    assert layer.get_mask_sizes(positions) == expected


def test_occupied_slots_are_those_with_a_position() -> None:
    expected = [[False, False, True, True], [False, True, True, True], [True] * 4]
    assert _pruned(n_later=2).occupied().tolist() == expected


def test_without_positions_all_slots_are_occupied() -> None:
    layer = _unsaid(*_states(KEPT))
    layer.update(*_states(2))
    assert layer.occupied().tolist() == [[True] * KEPT] * BATCH


@pytest.mark.parametrize("need", [ReadingNeeds.MASK, ReadingNeeds.POSITIONS])
def test_a_layer_in_need_of_help_is_not_updated_without_it(need: ReadingNeeds) -> None:
    layer = _pruned(needs=need)
    with pytest.raises(ScopeError, match="keep the scope of the press open"):
        layer.update(*_states(1))
    assert layer.get_seq_length() == SEEN
    layer.allow_update(Reader())
    layer.update(*_states(1))
    assert layer.get_seq_length() == SEEN + 1
    with pytest.raises(ScopeError):  # one mask is for one update
        layer.update(*_states(1))


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_an_uneven_layer_takes_several_tokens_only_with_a_mask_made_for_it(n_tokens: int) -> None:
    layer = _pruned(needs=ReadingNeeds.MASK_OF_MANY)
    if n_tokens > 1:
        with pytest.raises(ScopeError, match="keep the scope of the press open"):
            layer.update(*_states(n_tokens))
        layer.allow_update(Reader())
    layer.update(*_states(n_tokens))
    assert layer.get_seq_length() == SEEN + n_tokens


def test_help_ends_with_the_scope_that_gives_it() -> None:
    layer, reader = _pruned(needs=ReadingNeeds.MASK), Reader()
    layer.allow_update(reader)
    assert layer.is_allowed
    reader.is_open = False  # between the mask and the update, as after an exception
    assert not layer.is_allowed
    with pytest.raises(ScopeError):
        layer.update(*_states(1))


class OnlyTheSecondLayer(KnormPress):
    def compress(self, call: AttentionCall) -> Eviction | tuple[Tensor, Tensor]:
        return super().compress(call) if call.site.layer_idx == 1 else Eviction.nothing(call)


@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_layers_of_different_lengths_are_decoded_right_or_refused(
    implementation: str, n_tokens: int
) -> None:
    model = build("llama", attn_implementation=implementation)
    ids = torch.arange(3, 15)[None]
    press, inside, outside = OnlyTheSecondLayer(0.5), DynamicCache(), DynamicCache()
    with press(model):
        for cache in (inside, outside):
            model(ids, past_key_values=cache)
            assert [layer.keys.shape[2] for layer in cache.layers] == [12, 6]
        expected = model(ids[:, :n_tokens], past_key_values=inside).logits
    try:
        logits = model(ids[:, :n_tokens], past_key_values=outside).logits
    except ScopeError:
        return
    torch.testing.assert_close(logits, expected)


# ---- crop ----------------------------------------------------------------------------------------


def _crop_to(cache_or_layer: Any, length: int) -> None:
    """Crop as the installed transformers is told to."""
    seen = cache_or_layer.get_seq_length()
    cache_or_layer.crop(length if CROP_TAKES_LENGTH else length - seen)


@pytest.mark.parametrize("left", [0, 1, 3])
def test_crop_takes_away_what_came_after_the_pruning(left: int) -> None:
    for layer in (_pruned(n_later=3), _pruned(n_later=3)):
        keys, values = layer.keys, layer.values
        _crop_to(layer, SEEN + left)
        assert layer.get_seq_length() == SEEN + left
        assert torch.equal(layer.keys, keys[:, :, : KEPT + left])
        assert torch.equal(layer.values, values[:, :, : KEPT + left])


def test_crop_takes_a_number_of_tokens_away() -> None:
    layer = _pruned(n_later=3)
    keys = layer.keys
    layer.crop(-2)  # means the same in every version
    assert layer.get_seq_length() == SEEN + 1
    assert torch.equal(layer.keys, keys[:, :, : KEPT + 1])


def test_crop_through_the_cache_reaches_every_layer() -> None:
    cache = _cache(_pruned(n_later=3), _pruned(n_later=3))
    _crop_to(cache, SEEN + 1)
    assert [layer.get_seq_length() for layer in cache.layers] == [SEEN + 1] * 2


def test_crop_does_not_reach_into_the_pruned_part() -> None:
    layer = _pruned(n_later=3)
    keys = layer.keys
    for length in (SEEN - 1, KEPT, 1):
        with pytest.raises(UnsupportedCacheError, match="3 came after the pruning"):
            _crop_to(layer, length)
    with pytest.raises(UnsupportedCacheError):
        layer.crop(-4)
    assert layer.keys is keys
    assert layer.get_seq_length() == SEEN + 3


def test_crop_by_nothing_and_to_nothing_are_told_apart() -> None:
    layer = _pruned(n_later=3)
    if CROP_TAKES_LENGTH:
        with pytest.raises(UnsupportedCacheError):
            layer.crop(0)  # to no token at all
    else:
        layer.crop(0)
    assert layer.get_seq_length() == SEEN + 3


def test_crop_to_more_than_was_seen_changes_nothing() -> None:
    layer = _pruned(n_later=3)
    if CROP_TAKES_LENGTH:
        layer.crop(SEEN + 100)
    else:
        layer.crop(-0)
    assert layer.get_seq_length() == SEEN + 3


# ---- what generate does with layers --------------------------------------------------------------


def test_reset_forgets_everything() -> None:
    layer = _pruned(n_later=3)
    layer.reset()
    assert layer.get_seq_length() == layer.n_slots == 0
    assert layer.get_mask_sizes(4) == (4, 0)
    assert [kept.tolist() for kept in kept_lengths(_cache(layer))] == [[]]
    keys, _ = layer.update(*_states(2, batch=1))  # a batch of another size
    assert keys.shape[2] == layer.get_seq_length() == 2
    assert layer.get_mask_sizes(1) == (3, 0)


@pytest.mark.parametrize("need", [need for need in ReadingNeeds if need])
def test_reset_lifts_the_need_for_help(need: ReadingNeeds) -> None:
    layer = _pruned(needs=need)
    layer.reset()
    layer.update(*_states(2))
    assert layer.get_seq_length() == 2


def test_reset_forgets_rerotations_sinks_and_memories() -> None:
    layer = _rerotated(n_later=1)
    layer.sinks = Sinks(torch.zeros(BATCH, HEADS, 1, DIM), torch.ones(BATCH, dtype=torch.bool))
    layer.memories = {0: ScopeMemory(2)}
    layer.reset()
    known = layer.rerotation, layer.sinks, layer.positions, layer.memories or None
    assert all(x is None for x in known)
    layer.update(*_states(2))
    assert layer.all_positions().tolist() == [[[0, 1]]]  # type: ignore[union-attr]
    assert layer.all_rotary_positions() is None


@pytest.mark.parametrize("rows", [[2, 0, 0], [1], [0, 1, 2, 2]])
@pytest.mark.parametrize("method", ["reorder_cache", "batch_select_indices"])
def test_rows_are_selected_with_their_positions(method: str, rows: list[int]) -> None:
    layer = _pruned(n_later=2)
    keys, values, occupied = layer.keys, layer.values, layer.occupied()
    getattr(layer, method)(torch.tensor(rows))
    assert torch.equal(layer.keys, keys[rows])
    assert torch.equal(layer.values, values[rows])
    assert layer.positions is not None
    assert torch.equal(layer.positions, _positions()[rows].to(torch.int32))
    assert torch.equal(layer.occupied(), occupied[rows])
    assert layer.get_seq_length() == SEEN + 2


def test_rows_are_repeated_with_their_positions() -> None:
    layer = _pruned(n_later=2)
    keys, values = layer.keys, layer.values
    layer.batch_repeat_interleave(2)
    rows = [0, 0, 1, 1, 2, 2]
    assert torch.equal(layer.keys, keys[rows])
    assert torch.equal(layer.values, values[rows])
    assert layer.positions is not None
    assert torch.equal(layer.positions, _positions()[rows].to(torch.int32))
    assert layer.get_seq_length() == SEEN + 2


def test_everything_known_of_rows_is_selected_with_them() -> None:
    layer, rows = _rerotated(n_later=1), [2, 0]
    assert layer.rerotation is not None
    lag, rotary = layer.rerotation.row_lag, layer.all_rotary_positions()
    assert lag is not None
    assert rotary is not None
    sinks = torch.randn(BATCH, HEADS, 1, DIM)
    layer.sinks = Sinks(sinks, torch.tensor([True, False, True]))
    states = torch.randn(BATCH, 3, DIM)
    received = torch.randn(BATCH, HEADS, KEPT)  # of the later token nothing is known yet
    known = {"hidden_states": RecentStates((states,), 3)}
    layer.memories = {7: ScopeMemory(3, known, slots={"received": received})}
    layer.batch_select_indices(torch.tensor(rows))
    assert layer.rerotation.row_lag is not None
    assert torch.equal(layer.rerotation.row_lag, lag[rows])
    assert torch.equal(layer.all_rotary_positions(), rotary[rows])  # type: ignore[arg-type]
    assert torch.equal(layer.sinks.keys, sinks[rows])
    assert layer.sinks.known.tolist() == [True, True]
    assert layer.memories[7].n_steps == 3
    assert torch.equal(layer.memories[7].states["hidden_states"].joined(), states[rows])
    assert torch.equal(layer.memories[7].slots["received"], received[rows])


def test_rows_without_positions_are_selected_and_repeated_too() -> None:
    layer = _unsaid(*_states(KEPT))
    keys = layer.keys
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([5, 0]))
    assert torch.equal(layer.keys, keys[[2, 0]])
    assert layer.positions is None


def _pickled(layer: PrunedLayer) -> Any:
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_a_copy_is_a_pruned_layer_of_its_own(copied: Any) -> None:
    layer = _pruned(n_later=2)
    other = copied(layer)
    other.update(*_states(3))
    assert isinstance(other, PrunedLayer)
    assert (other.get_seq_length(), layer.get_seq_length()) == (SEEN + 5, SEEN + 2)
    assert torch.equal(other.keys[:, :, : KEPT + 2], layer.keys)
    assert torch.equal(other.occupied(), layer.occupied())
    assert layer.positions is not None
    other.reset()
    assert layer.positions is not None
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
        other = pickle.loads(pickle.dumps(cache))
        expected = model(ids[:, :5], past_key_values=cache).logits
        assert torch.equal(model(ids[:, :5], past_key_values=other).logits, expected)
    for one, two in zip(other.layers, cache.layers, strict=True):
        assert (type(one), one.n_slots, one.n_seen) == (PrunedLayer, two.n_slots, two.n_seen)
        assert (one.n_slots, one.n_seen) == (20 + 8, 40 + 8)
        assert torch.equal(one.positions, two.positions)


# ---- rotated anew --------------------------------------------------------------------------------


def _rerotated(n_later: int = 0) -> PrunedLayer:
    """As `_pruned`, with the kept keys at `0 ... KEPT - 1`; rows lag behind by 0, 2 and 1."""
    layer = _pruned()
    positions = torch.arange(KEPT, dtype=torch.int32).expand(BATCH, HEADS, KEPT)
    layer.rerotation = Rerotation(positions, SEEN - KEPT, torch.tensor([0, 2, 1]))
    if n_later:
        layer.update(*_states(n_later))
    return layer


def test_a_rerotated_layer_counts_on_from_where_its_keys_are() -> None:
    layer = _rerotated(n_later=2)
    assert layer.n_seen == SEEN + 2
    assert layer.get_seq_length() == KEPT + 2
    assert layer.get_mask_sizes(3) == (KEPT + 2 + 3, 0)


def test_later_tokens_of_a_rerotated_layer_stand_behind_its_keys_row_by_row() -> None:
    rotary = _rerotated(n_later=2).all_rotary_positions()
    assert rotary is not None
    kept = list(range(KEPT))
    for row, lag in enumerate([0, 2, 1]):
        expected = [*kept, KEPT - lag, KEPT + 1 - lag]
        assert rotary[row].tolist() == [expected] * HEADS
    positions = _rerotated(n_later=2).all_positions()
    assert positions is not None
    assert positions[..., -2:].tolist() == [[[SEEN, SEEN + 1]] * HEADS] * BATCH


# ---- what a scope buffers while decoding ---------------------------------------------------------


def test_a_buffer_holds_the_last_tokens_of_all_that_came() -> None:
    steps = [torch.randn(BATCH, n, DIM) for n in (1, 2, 1)]
    first = buffer = ScopeMemory()
    for step in steps:
        buffer = buffer.after_step(step.shape[1], 3, hidden_states=step)
    assert buffer.n_steps == 3
    assert set(buffer.states) == {"hidden_states"}
    assert torch.equal(buffer.last(3)["hidden_states"], torch.cat(steps, dim=1)[:, -3:])
    assert (first.n_steps, first.states) == (0, {})  # a value, which nobody has changed


def test_a_buffer_gives_back_whole_forwards() -> None:
    came = [torch.randn(BATCH, n, DIM) for n in (1, 1, 4, 1, 3)]
    buffer = ScopeMemory()
    for step in came:
        buffer = buffer.after_step(step.shape[1], 3, hidden_states=step)
    for n, n_steps in ((0, 5), (2, 5), (1, 4), (2, 3), (4, 1)):  # one after the other
        buffer = buffer.without_last(n, 0)
        assert buffer.n_steps == n_steps
    fewer = ScopeMemory()
    for step in (*came[:4], came[4][:, :2]):
        fewer = fewer.after_step(step.shape[1], 3, hidden_states=step)
    every = ScopeMemory()
    for step in came:
        every = every.after_step(step.shape[1], 3, hidden_states=step)
    left = every.without_last(1, 0).last(3)["hidden_states"]
    assert torch.equal(left, fewer.last(3)["hidden_states"])


def test_a_buffer_without_room_counts_only() -> None:
    buffer = ScopeMemory(4).after_step(1)
    assert (buffer.n_steps, buffer.states) == (5, {})


@pytest.mark.parametrize("remove", [1, 2, 3])
def test_crop_takes_the_tokens_out_of_the_buffers_too(remove: int) -> None:
    layer = _pruned(n_later=3)
    states = torch.randn(BATCH, 2, DIM), torch.randn(BATCH, HEADS, 2, DIM)
    received = torch.randn(BATCH, HEADS, KEPT + 1)  # nothing of the last two tokens
    known = {
        "hidden_states": RecentStates((states[0],), 2),
        "query": RecentStates(states[1].split(1, dim=2), 2),
    }
    layer.memories = {7: ScopeMemory(3, known, slots={"received": received})}
    layer.crop(-remove)
    buffer = layer.memories[7]
    left = max(0, 2 - remove)
    assert torch.equal(buffer.states["hidden_states"].joined(), states[0][:, :left])
    assert torch.equal(buffer.states["query"].joined(), states[1][:, :, :left])
    assert torch.equal(buffer.slots["received"], received[..., : KEPT + 3 - remove])
    up_to_date = buffer.of_slots(layer.n_slots)["received"]
    assert up_to_date.shape[-1] == layer.n_slots
    assert bool((up_to_date[..., KEPT + 1 :] == 0).all())


# ---- channels ------------------------------------------------------------------------------------


def _channels(n_later: int = 0) -> ChannelPrunedLayer:
    """`KEPT` tokens with the first two channels of their keys, and `n_later` with all."""
    keys, values = _states(KEPT)
    channels = torch.arange(2).expand(BATCH, HEADS, 2)
    layer = ChannelPrunedLayer(filled(DynamicLayer(), keys[..., :2].clone(), values), channels, DIM)
    layer.kept = KeptTokens(torch.arange(KEPT).expand(BATCH, HEADS, KEPT), KEPT, KEPT)
    if n_later:
        layer.allow_attention(Reader())
        layer.update(*_states(n_later))
    return layer


def test_a_layer_without_some_channels_is_updated_by_whoever_can_read_it_alone() -> None:
    layer = _channels()
    with pytest.raises(ScopeError, match="headwise"):
        layer.update(*_states(1))
    layer.allow_update(Reader())  # a scope that fits masks, and attends over nothing
    with pytest.raises(ScopeError, match="headwise"):
        layer.update(*_states(1))
    layer.allow_attention(Reader(is_open=False))
    with pytest.raises(ScopeError, match="headwise"):
        layer.update(*_states(1))
    layer.allow_attention(Reader())
    new = _states(2)
    assert all(a is b for a, b in zip(layer.update(*new), new, strict=True))
    assert layer.get_seq_length() == layer.n_slots == KEPT + 2
    assert torch.equal(layer.recent_keys, new[0])
    assert layer.keys.shape == (BATCH, HEADS, KEPT, 2)
    assert layer.values.shape == (BATCH, HEADS, KEPT + 2, DIM)


def test_channels_are_cropped_selected_and_counted_with_their_rows() -> None:
    layer = _channels(n_later=3)
    recent = layer.recent_keys
    layer.crop(-2)
    layer.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(layer.recent_keys, recent[[2, 0], :, :1])
    assert layer.channels.shape == (2, HEADS, 2)
    assert layer.n_slots == KEPT + 1
    assert kept_lengths(_cache(layer))[0].tolist() == [[KEPT + 1] * HEADS] * 2
    whole = _channels()
    assert cache_nbytes(_cache(whole)) == BATCH * HEADS * KEPT * (2 + DIM) * 4


# ---- what a cache holds --------------------------------------------------------------------------


def test_kept_lengths_count_tokens_and_not_empty_slots() -> None:
    plain = DynamicLayer()
    plain.update(*_states(7))
    lengths = kept_lengths(_cache(_pruned(n_later=2), plain, DynamicLayer()))
    assert [kept.dtype for kept in lengths] == [torch.int64] * 3
    assert lengths[0].tolist() == [[2 + 2] * HEADS, [3 + 2] * HEADS, [4 + 2] * HEADS]
    assert lengths[1].tolist() == [[7] * HEADS] * BATCH
    assert lengths[2].shape == (0, 0)


def test_kept_lengths_may_differ_per_head() -> None:
    positions = torch.tensor([[[-1, -1, 3], [0, 1, 2]]])
    layer = _holding(*_states(3, batch=1), KeptTokens(positions, 3, 8))
    assert kept_lengths(_cache(layer))[0].tolist() == [[1, 3]]


def test_bytes_are_counted_over_all_layers() -> None:
    cache = DynamicCache()
    for layer in range(3):
        cache.update(*_states(7), layer)
    assert cache_nbytes(cache) == 3 * 2 * BATCH * HEADS * 7 * DIM * 4
    assert cache_nbytes(DynamicCache()) == 0
    assert cache_nbytes(_cache(DynamicLayer())) == 0


def test_bytes_of_spare_capacity_count() -> None:
    room, values = torch.zeros(1, HEADS, 100, DIM), torch.zeros(1, HEADS, 6, DIM)
    layer = _unsaid(room[:, :, :6], values)
    assert cache_nbytes(_cache(layer)) == HEADS * (100 + 6) * DIM * 4


def test_bytes_of_shared_storage_count_once() -> None:
    both = torch.zeros(2, 1, HEADS, 6, DIM, dtype=torch.bfloat16)
    layers = [_unsaid(both[0], both[1]) for _ in range(2)]
    assert cache_nbytes(_cache(*layers)) == 2 * HEADS * 6 * DIM * 2


@pytest.mark.parametrize(("family", "first"), [("llama", 0), ("gemma3_text", 1)])
def test_the_mask_is_built_for_the_first_layer_that_does_not_slide(family: str, first: int) -> None:
    cache = DynamicCache(config=build(family).config)
    assert mask_layer(cache) is cache.layers[first]
    cache.layers[first] = layer = _pruned()
    assert mask_layer(cache) is layer


# ---- caches that cannot be pruned ----------------------------------------------------------------


def test_growing_layers_are_prunable() -> None:
    for cache in (DynamicCache(), DynamicCache(config=build("llama").config)):
        check_prunable(cache, 0)  # whether or not the layer is there yet
        cache.update(*_states(2), 0)
        check_prunable(cache, 0)
        assert prunable_layer(cache, 0) is cache.layers[0]
    layer = _pruned()
    assert prunable_layer(_cache(layer), 0) is layer


@pytest.mark.parametrize("check", [check_prunable, prunable_layer])
def test_a_static_cache_is_refused(check: Any) -> None:
    cache = StaticCache(config=build("llama").config, max_cache_len=16)
    with pytest.raises(UnsupportedCacheError, match=r"StaticCache.*StaticLayer.*DynamicCache"):
        check(cache, 0)


@pytest.mark.parametrize("check", [check_prunable, prunable_layer])
def test_a_sliding_layer_is_refused_and_its_full_neighbour_is_not(check: Any) -> None:
    cache = DynamicCache(config=build("gemma3_text").config)
    with pytest.raises(UnsupportedCacheError, match="DynamicSlidingWindowLayer"):
        check(cache, 0)
    check(cache, 1)


@pytest.mark.parametrize("check", [check_prunable, prunable_layer])
def test_a_layer_that_stores_otherwise_is_refused(check: Any) -> None:
    class CompressingLayer(DynamicLayer):
        """Stands for layers whose `keys` are not all they hold, as quantized ones."""

    with pytest.raises(UnsupportedCacheError, match="CompressingLayer"):
        check(_cache(CompressingLayer()), 0)


@pytest.mark.parametrize("check", [check_prunable, prunable_layer])
@pytest.mark.parametrize("cache", [((torch.zeros(1), torch.zeros(1)),), object(), None])
def test_what_is_no_cache_is_refused_by_its_type(check: Any, cache: Any) -> None:
    with pytest.raises(UnsupportedCacheError, match=type(cache).__name__):
        check(cache, 0)
