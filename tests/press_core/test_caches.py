"""A pruned layer is a cache layer like any other, and knows what it has seen."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from experiments.testbed.families import build
from patch_impl import KnormPress
from press_core import (
    AttentionCall,
    PrunedLayer,
    ScopeError,
    UnsupportedCacheError,
    cache_nbytes,
    kept_lengths,
)
from press_core.cache.caches import check_prunable, mask_layer, prunable_layer

BATCH, HEADS, KEPT, SEEN, DIM = 3, 2, 4, 10, 5
CROP_TAKES_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def _states(n: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, n, DIM), torch.randn(batch, HEADS, n, DIM)


def _positions() -> Tensor:
    """Two slots of the first row are empty, one of the second."""
    rows = [[-1, -1, 6, 9], [-1, 3, 4, 8], [0, 1, 2, 9]]
    return torch.tensor(rows)[:, None].expand(BATCH, HEADS, KEPT)


def _pruned(n_later: int = 0, padded: bool = False) -> PrunedLayer:
    """`KEPT` of `SEEN` tokens, and `n_later` that came afterwards."""
    layer = PrunedLayer()
    layer.hold(*_states(KEPT), _positions(), SEEN, padded)
    if n_later:
        layer.update(*_states(n_later))
    return layer


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
    layer = PrunedLayer()
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
    layer = PrunedLayer()
    layer.hold(*_states(KEPT), None, SEEN, False)
    layer.update(*_states(2))
    assert layer.occupied().tolist() == [[True] * KEPT] * BATCH


def test_a_padded_layer_is_not_updated_without_a_mask_made_for_it() -> None:
    layer = _pruned(padded=True)
    with pytest.raises(ScopeError, match="keep the scope of the press open"):
        layer.update(*_states(1))
    assert layer.get_seq_length() == SEEN
    layer.serve()
    layer.update(*_states(1))
    assert layer.get_seq_length() == SEEN + 1
    with pytest.raises(ScopeError):  # one mask serves one update
        layer.update(*_states(1))


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_an_uneven_layer_takes_several_tokens_only_with_a_mask_made_for_it(n_tokens: int) -> None:
    layer = _pruned()
    layer.uneven = True
    if n_tokens > 1:
        with pytest.raises(ScopeError, match="keep the scope of the press open"):
            layer.update(*_states(n_tokens))
        layer.serve()
    layer.update(*_states(n_tokens))
    assert layer.get_seq_length() == SEEN + n_tokens


class OnlyTheSecondLayer(KnormPress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return super().compress(call) if call.site.layer_idx == 1 else (call.keys, call.values)


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
    layer = _pruned(n_later=3, padded=False)
    layer.reset()
    assert layer.get_seq_length() == layer.n_slots == 0
    assert layer.get_mask_sizes(4) == (4, 0)
    assert [kept.tolist() for kept in kept_lengths(_cache(layer))] == [[]]
    keys, _ = layer.update(*_states(2, batch=1))  # a batch of another size
    assert keys.shape[2] == layer.get_seq_length() == 2
    assert layer.get_mask_sizes(1) == (3, 0)


@pytest.mark.parametrize("demand", ["padded", "uneven"])
def test_reset_lifts_the_demand_for_a_mask(demand: str) -> None:
    layer = _pruned()
    setattr(layer, demand, True)
    layer.reset()
    layer.update(*_states(2))
    assert layer.get_seq_length() == 2


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


def test_rows_without_positions_are_selected_and_repeated_too() -> None:
    layer = PrunedLayer()
    layer.hold(*_states(KEPT), None, SEEN, False)
    keys = layer.keys
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([5, 0]))
    assert torch.equal(layer.keys, keys[[2, 0]])
    assert layer.positions is None


def test_a_copy_is_a_pruned_layer_of_its_own() -> None:
    layer = _pruned(n_later=2)
    other = copy.deepcopy(layer)
    other.update(*_states(3))
    assert isinstance(other, PrunedLayer)
    assert (other.get_seq_length(), layer.get_seq_length()) == (SEEN + 5, SEEN + 2)
    assert torch.equal(other.keys[:, :, : KEPT + 2], layer.keys)
    assert torch.equal(other.occupied(), layer.occupied())
    assert layer.positions is not None
    other.reset()
    assert layer.positions is not None
    assert layer.get_mask_sizes(1) == (KEPT + 3, SEEN - KEPT)


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
    layer = PrunedLayer()
    positions = torch.tensor([[[-1, -1, 3], [0, 1, 2]]])
    layer.hold(*_states(3, batch=1), positions, 8, False)
    assert kept_lengths(_cache(layer))[0].tolist() == [[1, 3]]


def test_bytes_are_counted_over_all_layers() -> None:
    cache = DynamicCache()
    for layer in range(3):
        cache.update(*_states(7), layer)
    assert cache_nbytes(cache) == 3 * 2 * BATCH * HEADS * 7 * DIM * 4
    assert cache_nbytes(DynamicCache()) == 0
    assert cache_nbytes(_cache(DynamicLayer())) == 0


def test_bytes_of_spare_capacity_count() -> None:
    layer = PrunedLayer()
    room, values = torch.zeros(1, HEADS, 100, DIM), torch.zeros(1, HEADS, 6, DIM)
    layer.hold(room[:, :, :6], values, None, 50, False)
    assert cache_nbytes(_cache(layer)) == HEADS * (100 + 6) * DIM * 4


def test_bytes_of_shared_storage_count_once() -> None:
    both = torch.zeros(2, 1, HEADS, 6, DIM, dtype=torch.bfloat16)
    layers = []
    for _ in range(2):
        layer = PrunedLayer()
        layer.hold(both[0], both[1], None, 50, False)
        layers.append(layer)
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
