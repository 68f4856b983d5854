"""Keys that have lost channels: the layer, and attention over it written out number by number."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from attention_patch.channels import attend_channels
from press_core import (
    AttentionSite,
    ScopeError,
    UnsupportedCacheError,
    UnsupportedInputError,
    attention_sites,
    cache_nbytes,
    kept_lengths,
)
from press_core.cache.channels import ChannelPrunedLayer
from press_core.cache.masks import causal
from press_core.cache.storage import Storage
from press_core.cache.tokens import Kept
from press_core.model.sites import Softmax
from tests.support import build, reading

DIM, N = 8, 12
CHANNELS = torch.tensor([[[0, 2, 7], [1, 2, 3]], [[4, 5, 6], [0, 1, 7]]])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def pruned(dtype: torch.dtype = torch.float64) -> tuple[ChannelPrunedLayer, Tensor, Tensor]:
    """A layer with three of eight channels, and its keys with zeros in the others and values."""
    keys, values = (random(2, 2, N, DIM, seed=seed, dtype=dtype) for seed in (1, 2))
    index = CHANNELS.unsqueeze(2).expand(-1, -1, N, -1)
    storage = Storage(DynamicLayer()).holding(keys.gather(-1, index), values)
    layer = ChannelPrunedLayer(storage, CHANNELS, DIM)
    layer.kept = Kept(torch.arange(N, dtype=torch.int32).expand(2, 2, N), N, N)
    return layer, torch.zeros_like(keys).scatter(-1, index, keys.gather(-1, index)), values


def append(
    layer: ChannelPrunedLayer, n: int, seed: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    batch, heads = layer.keys.shape[:2]
    keys, values = (random(batch, heads, n, DIM, seed=s, dtype=dtype) for s in (seed, -seed))
    with reading(layer):
        layer.update(keys, values)
    return keys, values


def example(n_queries: int = 1, n_before: int = 2, dtype: torch.dtype = torch.float64) -> Any:
    """A layer after a few more tokens, and what it stands for: whole keys and values."""
    layer, keys, values = pruned(dtype)
    for n in (n_before, n_queries):
        new_keys, new_values = append(layer, n, seed=10 + n, dtype=dtype)
        keys, values = torch.cat((keys, new_keys), 2), torch.cat((values, new_values), 2)
    return layer, keys, values


def site(softcap: float | None = None) -> AttentionSite:
    return replace(attention_sites(build("llama"))[0], softmax=Softmax(0.4, softcap))


def run(
    layer: ChannelPrunedLayer, query: Tensor, mask: Any = None, of: Any = None, **kw: Any
) -> Tensor:
    """`(B, H, q, d)`, as an attention module would get it; without a `mask` causal."""
    of, q = of or site(), query.shape[2]
    if mask is None and q > 1:
        mask = causal(q, layer.recent_keys.shape[2], query.device)[None, None]
    new = torch.full_like(query, float("nan"))  # what update returns is not to be read
    output, weights = attend_channels(of, layer, None, None, of.module, query, new, new, mask, **kw)
    assert weights is None
    assert output.is_contiguous()
    return output.transpose(1, 2)


def slowly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Any = lambda row, i, j: True,
    scaling: float = 0.4,
    softcap: float | None = None,
    sinks: list[float] | None = None,
) -> Tensor:
    """Attention over whole keys, one query and one key at a time."""
    batch, n_heads, n_queries, _ = query.shape
    n, group = keys.shape[2], n_heads // keys.shape[1]
    output = torch.empty(query.shape, dtype=torch.float64)
    for row, head, i in itertools.product(range(batch), range(n_heads), range(n_queries)):
        logits = {}
        for j in range(n - n_queries + i + 1):
            if seen(row, i, j):
                key = keys[row, head // group, j].double()
                logit = float(query[row, head, i].double() @ key) * scaling
                logits[j] = logit if softcap is None else math.tanh(logit / softcap) * softcap
        total = sum(math.exp(logit) for logit in logits.values())
        total += 0 if sinks is None else math.exp(sinks[head])
        output[row, head, i] = sum(
            math.exp(logit) / total * values[row, head // group, j].double()
            for j, logit in logits.items()
        )
    return output


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_queries", [1, 4])
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_logits_are_those_of_keys_with_zeros(n_queries, group, dtype, atol):
    layer, keys, values = example(n_queries, dtype=dtype)
    query = random(2, 2 * group, n_queries, DIM, dtype=dtype)
    output = run(layer, query)
    assert output.dtype == dtype
    expected = slowly(query, keys, values)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("of_all", [True, False], ids=["of all tokens", "of recent ones"])
@pytest.mark.parametrize("n_queries", [1, 3])
def test_masks(of_all, n_queries):
    layer, keys, values = example(n_queries)
    query, n = random(2, 4, n_queries, DIM), keys.shape[2]

    def seen(row: int, i: int, j: int) -> bool:
        return not ((of_all and row == 1 and j < 5) or j == N + row)

    expected = slowly(query, keys, values, seen)
    columns = torch.tensor([[seen(row, 0, j) for j in range(n)] for row in range(2)])
    mask = (columns[:, None] & causal(n_queries, n, query.device))[:, None]
    mask = mask if of_all else mask[..., N:]
    torch.testing.assert_close(run(layer, query, mask), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_queries", [1, 3])
def test_masks_of_each_head(n_queries):
    """Each head's output is that under its own mask given to all of them."""
    layer, keys, _ = example(n_queries)
    query, n = random(2, 4, n_queries, DIM), keys.shape[2]
    mask = random(2, 4, n_queries, n) > 0
    mask[..., -1] = True
    output = run(layer, query, mask)
    for head in range(4):
        alone = run(layer, query, mask[:, head : head + 1])
        torch.testing.assert_close(output[:, head], alone[:, head], rtol=0, atol=1e-12)
        others = [other for other in range(4) if other != head]
        assert not torch.allclose(output[:, others], alone[:, others])


def test_dropout_is_refused():
    layer, _, _ = example()
    with pytest.raises(UnsupportedInputError, match=r"no dropout, got 0.2; call model\.eval\(\)"):
        run(layer, random(2, 4, 1, DIM), dropout=0.2)


@pytest.mark.parametrize("n_queries", [1, 3])
def test_soft_capped_logits_and_sinks(n_queries):
    layer, keys, values = example(n_queries)
    query, sinks = random(2, 4, n_queries, DIM), [0.5, -1.0, 3.0, 2.0]
    output = run(layer, query, of=site(1.5), s_aux=torch.tensor(sinks), scaling=0.7)
    expected = slowly(query, keys, values, scaling=0.7, softcap=1.5, sinks=sinks)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


# ---- the layer -----------------------------------------------------------------------------------


def assert_holds(layer: ChannelPrunedLayer, keys: Tensor, values: Tensor) -> None:
    """By what attention over it gives: every key and value has its part in it."""
    assert layer.n_slots == keys.shape[2]
    query = random(len(keys), 4, 1, DIM, seed=99)
    expected = slowly(query, keys, values)
    torch.testing.assert_close(run(layer, query), expected, rtol=0, atol=1e-12)


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
