"""Keys that have lost channels: the layer; attention over it is in `test_kernels.py`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from press_core import ScopeError, UnsupportedCacheError, cache_nbytes, kept_lengths
from press_core.cache.channels import ChannelPrunedLayer
from press_core.cache.storage import Storage
from press_core.cache.tokens import Kept
from tests.attention_patch.test_kernels import (
    CHANNELS,
    Example,
    assert_equal,
    pruned,
    random,
    run,
    slowly,
    update,
)

DIM, N = 8, 12


def append(layer: ChannelPrunedLayer, n: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    shape = *layer.keys.shape[:2], n, DIM
    keys, values = random(*shape, seed=seed), random(*shape, seed=-seed)
    update(layer, keys, values)
    return keys, values


def assert_holds(layer: ChannelPrunedLayer, keys: Tensor, values: Tensor) -> None:
    """By what attention over it gives: every key and value has its part in it."""
    assert layer.n_slots == keys.shape[2]
    case = Example(layer, random(len(keys), 4, 1, DIM, seed=99), 1, 1, (keys, values))
    assert_equal(run(None, case), slowly(case))


def test_it_counts_what_it_holds_and_what_it_has_seen():
    keys, values = random(1, 2, 5, 3), random(1, 2, 5, DIM)
    layer = ChannelPrunedLayer(Storage(DynamicLayer()).holding(keys, values), CHANNELS[:1], DIM)
    layer.kept = Kept(torch.tensor([0, 1, 4, 7, 8]).expand(1, 2, 5).int(), 5, 9)
    append(layer, 2)
    assert layer.n_slots == 7
    assert layer.get_seq_length() == 11
    assert layer.get_mask_sizes(3) == (10, 4)
    cache = DynamicCache()
    cache.layers.append(layer)
    assert kept_lengths(cache)[0].tolist() == [[7, 7]]
    assert cache_nbytes(cache) == 8 * 2 * (5 * 3 + 2 * DIM + 7 * DIM)


def test_only_who_attends_over_it_may_append():
    layer, keys, values = pruned()
    new = random(2, 2, 1, DIM)
    for _ in range(2):
        with pytest.raises(ScopeError, match=r"attention_patch\.headwise\(model\)"):
            layer.update(new, new)
        append(layer, 1)
    layer.crop(-2)
    assert_holds(layer, keys, values)


def test_crop():
    layer, keys, values = pruned()
    first = append(layer, 3)
    append(layer, 4, seed=8)
    layer.crop(-4)
    assert_holds(layer, *(torch.cat(x, 2) for x in zip((keys, values), first, strict=True)))
    with pytest.raises(UnsupportedCacheError, match=r"cannot crop 4 tokens.*3 came after"):
        layer.crop(-4)
    layer.crop(-3)
    assert_holds(layer, keys, values)


ROWS = {
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "select again": (lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0])), [1, 1, 0]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("n_later", [0, 3])
def test_rows(name, n_later):
    layer, keys, values = pruned()
    if n_later:
        new_keys, new_values = append(layer, n_later)
        keys, values = torch.cat((keys, new_keys), 2), torch.cat((values, new_values), 2)
    cache = DynamicCache()
    cache.layers.append(layer)
    operate, rows = ROWS[name]
    operate(cache)
    assert_holds(layer, keys[rows], values[rows])
    append(layer, 1)
    assert layer.n_slots == N + n_later + 1


def test_a_copy_goes_its_own_way():
    layer, keys, values = pruned()
    other = copy.deepcopy(layer)
    append(layer, 3)
    assert_holds(other, keys, values)


def test_reset_frees_it_and_says_so():
    layer, _, _ = pruned()
    append(layer, 3)
    layer.reset()
    cache = DynamicCache()
    cache.layers.append(layer)
    assert cache.get_seq_length() == 0
    assert cache_nbytes(cache) == 0
    for operate, _ in ROWS.values():
        operate(cache)
    cache.crop(0)
    with pytest.raises(ScopeError, match=r"was reset.*; make a new one"):
        layer.update(random(2, 2, 1, DIM), random(2, 2, 1, DIM))
