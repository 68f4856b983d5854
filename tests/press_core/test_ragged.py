"""The layer in which every head keeps its own number of tokens, against lists of lists."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from press_core import RaggedLayer, ScopeError, UnsupportedCacheError, cache_nbytes, kept_lengths
from press_core.cache import ragged as module
from press_core.cache.ragged import Blocks
from tests.support import Reader

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
N_PROGRAMS = {"short": 15, "long": 1000}.get(PROFILE, 60)
DIM = 4
# transformers 5.2 crops to a length, later releases crop a number of tokens away.
CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def states(batch: int, n_heads: int, n: int, seed: int = 0, dim: int = DIM) -> tuple[Tensor, ...]:
    """Random keys and values, `(batch, n_heads, n, dim)` each."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch, n_heads, n, dim
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def ragged(kept: list[list[list[int]]], n: int, dim: int = DIM) -> tuple[RaggedLayer, Tensor]:
    """A layer that holds the positions `kept` of each row and head out of `n`, and all keys."""
    keys, values = states(len(kept), len(kept[0]), n, dim=dim)
    mask = torch.zeros(keys.shape[:3], dtype=torch.bool)
    for row, of_row in enumerate(kept):
        for head, positions in enumerate(of_row):
            mask[row, head, positions] = True
    return RaggedLayer.of(keys, values, mask, torch.arange(n).view(1, 1, -1), n), keys


def append(layer: RaggedLayer, n: int, seed: int = 1) -> tuple[Tensor, ...]:
    new = states(layer.batch, layer.n_heads, n, seed, layer.keys.shape[-1])
    layer.allow_update(Reader())
    layer.update(*new)
    return new


def held(layer: RaggedLayer) -> list[list[list[int]]]:
    """Positions per row and head, as the padded form has them."""
    rows = layer.dense()[2].tolist()
    return [[[p for p in head if p >= 0] for head in row] for row in rows]


# ---- drawn sequences of operations ---------------------------------------------------------------


class Token:
    """What a head holds of one token."""

    def __init__(self, position: int, key: Tensor, value: Tensor) -> None:
        self.position, self.key, self.value = position, key, value


class AgainstLists(RuleBasedStateMachine):
    """A ragged layer, and per row and head a list of the tokens that it should hold."""

    layer: RaggedLayer
    rows: list[list[list[Token]]]

    @initialize(data=st.data(), batch=st.integers(1, 3), n_heads=st.integers(1, 3))
    def prefill(self, data: Any, batch: int, n_heads: int) -> None:
        n = data.draw(st.sampled_from([1, 2, 7, 20, 130]))
        self.n_drawn, self.seen, self.recent = 0, n, 0
        keys, values = self.drawn_states(batch, n_heads, n)
        kept = torch.tensor([[data.draw(some_of(n)) for _ in range(n_heads)] for _ in range(batch)])
        positions = torch.arange(n).view(1, 1, n)
        self.layer = RaggedLayer.of(keys, values, kept, positions, n)
        self.rows = [
            [
                [Token(p, keys[b, h, p], values[b, h, p]) for p in range(n) if kept[b, h, p]]
                for h in range(n_heads)
            ]
            for b in range(batch)
        ]
        self.most = self.total

    def drawn_states(self, batch: int, n_heads: int, n: int) -> tuple[Tensor, ...]:
        self.n_drawn += 1
        return states(batch, n_heads, n, self.n_drawn)

    @property
    def total(self) -> int:
        return sum(len(head) for row in self.rows for head in row)

    @rule(n=st.sampled_from([1, 1, 1, 2, 5, 40]))
    def update(self, n: int) -> None:
        keys, values = self.drawn_states(len(self.rows), len(self.rows[0]), n)
        self.layer.allow_update(Reader())
        new = self.layer.update(keys, values)
        assert new[0] is keys
        assert new[1] is values
        for b, row in enumerate(self.rows):
            for h, head in enumerate(row):
                head += [Token(self.seen + i, keys[b, h, i], values[b, h, i]) for i in range(n)]
        self.seen, self.recent = self.seen + n, self.recent + n
        self.most = max(self.most, self.total)

    @rule(steps=st.integers(5, 15))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.update(1)

    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        kept = [x for row in self.rows for head in row for x in data.draw(some_of(len(head)))]
        self.layer.keep(torch.tensor(kept))
        left = iter(kept)
        self.rows = [[[t for t in head if next(left)] for head in row] for row in self.rows]
        self.recent, self.most = 0, self.total

    @rule(data=st.data())
    def crop(self, data: Any) -> None:
        n = data.draw(st.integers(0, self.recent))
        if n or not CROPS_TO_LENGTH:
            self.layer.crop(-n)
        if n:
            self.rows = [[head[:-n] for head in row] for row in self.rows]
        self.seen, self.recent = self.seen - n, self.recent - n

    @precondition(lambda self: CROPS_TO_LENGTH)
    @rule(data=st.data())
    def crop_to_length(self, data: Any) -> None:
        n = data.draw(st.integers(0, self.recent))
        self.layer.crop(self.seen - n)
        if n:
            self.rows = [[head[:-n] for head in row] for row in self.rows]
        self.seen, self.recent = self.seen - n, self.recent - n

    @rule(data=st.data(), beams=st.booleans())
    def select(self, data: Any, beams: bool) -> None:
        size = len(self.rows) if beams else data.draw(st.integers(1, 4))
        row = st.integers(0, len(self.rows) - 1)
        chosen = data.draw(st.lists(row, min_size=size, max_size=size))
        if beams:
            self.layer.reorder_cache(torch.tensor(chosen))
        else:
            self.layer.batch_select_indices(torch.tensor(chosen))
        self.rows = [[[*head] for head in self.rows[row]] for row in chosen]
        self.most = self.total

    @precondition(lambda self: len(self.rows) <= 3)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats: int) -> None:
        self.layer.batch_repeat_interleave(repeats)
        self.rows = [[[*head] for head in row] for row in self.rows for _ in range(repeats)]
        self.most = self.total

    @rule(deep=st.booleans())
    def copy(self, deep: bool) -> None:
        """Goes on with a copy; what becomes of the former must not matter."""
        former = self.layer
        self.layer = copy.deepcopy(former) if deep else pickle.loads(pickle.dumps(former))
        for name in ("keys", "values", "slots", "recent_keys", "recent_values"):
            mine, its = getattr(self.layer, name), getattr(former, name)
            assert not mine.numel() or mine.data_ptr() != its.data_ptr()
        former.reset()

    @invariant()
    def holds_the_same(self) -> None:
        layer, n_heads = self.layer, len(self.rows[0])
        assert layer.get_seq_length() == self.seen
        assert layer.get_mask_sizes(3) == (self.seen + 3, 0)
        assert layer.get_mask_sizes(torch.arange(3)) == (self.seen + 3, 0)
        assert layer.batch == len(self.rows)
        assert layer.lengths.tolist() == [[len(head) for head in row] for row in self.rows]
        assert layer.n_recent == self.recent
        for b, row in enumerate(self.rows):
            for h, head in enumerate(row):
                keys, values = layer.head(b * n_heads + h)
                assert len(keys) == len(head)
                for i, token in enumerate(head):
                    assert torch.equal(keys[i], token.key)
                    assert torch.equal(values[i], token.value)

    @invariant()
    def pads_on_the_left(self) -> None:
        keys, values, positions = self.layer.dense()
        longest = max(len(head) for row in self.rows for head in row)
        assert keys.shape == values.shape == (*positions.shape, DIM)
        assert positions.shape == (len(self.rows), len(self.rows[0]), longest)
        for b, row in enumerate(self.rows):
            for h, head in enumerate(row):
                missing = longest - len(head)
                assert positions[b, h].tolist() == [-1] * missing + [t.position for t in head]
                assert not keys[b, h, :missing].any()
                assert not values[b, h, :missing].any()
                for i, token in enumerate(head, start=missing):
                    assert torch.equal(keys[b, h, i], token.key)

    @invariant()
    def stores_little_more_than_it_holds(self) -> None:
        """At most 3%, of what it held before a crop; and knows which slots are empty."""
        layer = self.layer
        slots, room = layer.slots.numel(), layer.recent_keys.shape[:2].numel()
        assert layer.keys.shape == layer.values.shape == (*layer.slots.shape, DIM)
        assert layer.recent_values.shape == layer.recent_keys.shape
        assert slots + room <= 1.03 * self.most
        recent = layer.n_recent * len(layer.counts)
        assert int((layer.slots >= 0).sum()) + recent == self.total


def some_of(n: int) -> st.SearchStrategy[list[bool]]:
    """Which of `n` tokens to keep: all, or some, and never none."""
    some = st.integers(1, 2**n - 1).map(lambda bits: [bool(bits >> i & 1) for i in range(n)])
    return st.one_of(st.just([True] * n), some)


TestAgainstLists = AgainstLists.TestCase
TestAgainstLists.settings = settings(
    max_examples=N_PROGRAMS,
    stateful_step_count=12,
    derandomize=PROFILE != "long",
    database=None,
    deadline=None,
)


# ---- where heads lie -----------------------------------------------------------------------------


@given(
    n_heads=st.integers(1, 4),
    batch=st.integers(1, 3),
    few=st.sampled_from([-1, 2**18]),
    data=st.data(),
)
@settings(max_examples=10 * N_PROGRAMS, derandomize=PROFILE != "long", database=None, deadline=None)
def test_every_head_reads_its_own_tokens_once_and_no_others(
    n_heads: int, batch: int, few: int, data: st.DataObject
) -> None:
    n = n_heads * batch
    counts = data.draw(st.lists(st.integers(0, 400), min_size=n, max_size=n))
    counts[0] += 1  # not all of them empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW", few)
        blocks = Blocks.of(counts, n_heads, torch.zeros(1, DIM))
    slots = blocks.slots(counts)
    owner = torch.full((blocks.n * blocks.size,), -1)
    owner[slots] = torch.arange(n).repeat_interleave(torch.tensor(counts))
    assert int((owner >= 0).sum()) == sum(counts)
    assert len(owner) <= (1 + module.WASTE) * sum(counts)
    n_own = blocks.n_own
    n_readers = (len(blocks.heads) - n_own) // max(1, blocks.n - n_own)
    read = torch.arange(blocks.n)
    read = torch.cat((read[:n_own], read[n_own:].repeat_interleave(n_readers)))
    own = owner.view(blocks.n, blocks.size)[read] == blocks.heads[:, None]
    seen = blocks.hidden[:, 0] == 0
    assert not (seen & ~own).any()
    assert int(seen.sum()) == sum(counts)
    assert blocks.hidden[:, 0][~seen].isneginf().all()
    if blocks.of_rows:
        assert blocks.heads.tolist() == list(range(n))


@pytest.mark.parametrize("n_heads", [4, 8, 64])
@pytest.mark.parametrize("mean", [102, 410, 820, 3277])
def test_blocks_are_long_and_few_heads_read_each(n_heads: int, mean: int) -> None:
    """However uneven the heads are."""
    drawn = torch.rand(n_heads, generator=torch.Generator().manual_seed(mean)) ** 3
    counts = (1 + mean * drawn / drawn.mean()).long().tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW", -1)
        blocks = Blocks.of(counts, n_heads, torch.zeros(1, 64))
    assert 32 <= blocks.size <= 128
    assert len(blocks.heads) <= blocks.n + 4 * n_heads


# ---- one by one ----------------------------------------------------------------------------------

KEPT = [[[0, 3, 4, 9], [1]], [[2, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]]


def test_it_grows_over_thousands_of_steps() -> None:
    """And moves what came later once in a while, not at every step; the context never."""
    layer, keys = ragged([[list(range(0, 1000, 2)), list(range(0, 1000, 5))]], 1000)
    context, moved, new = layer.keys, 0, []
    for step in range(2000):
        former = layer.recent_keys
        new.append(append(layer, 1, seed=step)[0])
        moved += layer.recent_keys is not former
        slots = layer.slots.numel() + layer.recent_keys.shape[:2].numel()
        assert slots <= 1.03 * sum(layer.counts)
    assert layer.keys is context
    assert layer.counts == [2500, 2200]
    assert torch.equal(layer.head(1)[0], torch.cat((keys[0, 1, ::5], torch.cat(new, 2)[0, 1])))
    assert held(layer) == [
        [[*range(0, 1000, 2), *range(1000, 3000)], [*range(0, 1000, 5), *range(1000, 3000)]]
    ]
    assert moved < 2000 * 0.1  # room for 3 at first, for 23 in the end


def test_tokens_may_have_positions_of_their_own_in_each_head() -> None:
    """As after another press that kept other tokens of each head."""
    keys, values = states(2, 2, 3)
    positions = torch.tensor([[[0, 2, 5], [1, 2, 3]], [[4, 5, 6], [0, 7, 8]]])
    kept = torch.tensor([[[1, 0, 1], [1, 1, 1]], [[0, 0, 1], [1, 1, 0]]]).bool()
    layer = RaggedLayer.of(keys, values, kept, positions, 9)
    assert held(layer) == [[[0, 5], [1, 2, 3]], [[6], [0, 7]]]
    append(layer, 2)
    assert held(layer) == [[[0, 5, 9, 10], [1, 2, 3, 9, 10]], [[6, 9, 10], [0, 7, 9, 10]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_states_keep_their_dtype_and_their_bits(dtype) -> None:
    keys, values = (x.to(dtype) for x in states(1, 2, 5))
    kept = torch.tensor([[[1, 0, 1, 1, 0], [0, 1, 0, 0, 0]]]).bool()
    layer = RaggedLayer.of(keys, values, kept, torch.arange(5).view(1, 1, -1), 5)
    layer.allow_update(Reader())
    layer.update(keys[:, :, :1], values[:, :, :1])
    assert layer.keys.dtype == layer.values.dtype == layer.dense()[0].dtype == dtype
    assert torch.equal(layer.head(0)[0], keys[0, 0, [0, 2, 3, 0]])
    assert torch.equal(layer.head(1)[1], values[0, 1, [1, 0]])


def test_gradients_reach_what_was_stored_and_what_came_later() -> None:
    keys, values = (x.requires_grad_() for x in states(1, 2, 5))
    kept = torch.tensor([[[1, 0, 1, 1, 0], [0, 1, 0, 0, 0]]]).bool()
    layer = RaggedLayer.of(keys, values, kept, torch.arange(5).view(1, 1, -1), 5)
    new = [x.requires_grad_() for x in states(1, 2, 2)]
    layer.allow_update(Reader())
    layer.update(*new)
    layer.dense()[0].sum().backward()
    assert torch.equal(keys.grad, kept.unsqueeze(-1).expand_as(keys).float())
    assert torch.equal(new[0].grad, torch.ones_like(new[0]))
    assert values.grad is None


def test_without_gradients_nothing_keeps_a_graph_alive() -> None:
    keys, values = (x.requires_grad_() for x in states(1, 2, 5))
    kept = torch.ones(1, 2, 5, dtype=torch.bool)
    with torch.no_grad():
        layer = RaggedLayer.of(keys, values, kept, torch.arange(5).view(1, 1, -1), 5)
        layer.allow_update(Reader())
        layer.update(keys[:, :, :1], values[:, :, :1])
    assert not any(x.requires_grad for x in (*layer.dense()[:2], *layer.recent))


def test_a_layer_made_in_inference_mode_goes_on_outside_of_it() -> None:
    with torch.inference_mode():
        layer, _ = ragged([[list(range(200)), [3]]], 200)  # with room for one token
        append(layer, 1)
    assert layer.recent_keys.is_inference()
    append(layer, 1)
    assert held(layer)[0][1] == [3, 200, 201]
    with torch.inference_mode():
        append(layer, 1)
    assert held(layer)[0][1] == [3, 200, 201, 202]


def test_only_a_scope_may_append() -> None:
    layer, keys = ragged(KEPT, 10)
    new = states(2, 2, 1)
    with pytest.raises(ScopeError, match=r"attention_patch\.headwise\(model\)"):
        layer.update(*new)
    layer.allow_update(Reader())
    layer.update(*new)
    with pytest.raises(ScopeError, match="scope of the press"):
        layer.update(*new)  # one serving, one update
    layer.allow_update(Reader())
    layer.disallow_update()
    with pytest.raises(ScopeError):
        layer.update(*new)
    assert layer.lengths.tolist() == [[5, 2], [3, 11]]
    assert torch.equal(layer.head(0)[0][:4], keys[0, 0, [0, 3, 4, 9]])


@pytest.mark.parametrize("remove", [4, 13])
def test_what_was_evicted_does_not_come_back(remove) -> None:
    layer, _ = ragged(KEPT, 10)
    append(layer, 3)
    before = held(layer)
    with pytest.raises(UnsupportedCacheError, match=f"cannot crop {remove} tokens.*: 3 came after"):
        layer.crop(-remove)
    assert held(layer) == before
    layer.crop(-3)
    assert held(layer) == KEPT
    assert layer.get_seq_length() == 10


def test_cropped_room_is_used_again() -> None:
    layer, _ = ragged(KEPT, 10)
    append(layer, 30)
    layer.crop(-30)
    storage = layer.recent_keys
    for seed in range(3):  # three questions on one context
        new, _ = append(layer, 30, seed)
        assert layer.recent_keys is storage
        assert torch.equal(layer.head(1)[0][1:], new[0, 1])
        layer.crop(-30)
        assert held(layer) == KEPT


def test_selected_rows_bring_no_room_of_longer_ones() -> None:
    long, short = list(range(2000)), [5]
    layer, _ = ragged([[long, long], [short, short]], 2000)
    layer.batch_select_indices(torch.tensor([1]))
    assert held(layer) == [[short, short]]
    assert layer.slots.numel() == 2


def test_a_mask_selects_rows_too() -> None:
    layer, _ = ragged(KEPT, 10)
    layer.batch_select_indices(torch.tensor([False, True]))
    assert held(layer) == KEPT[1:]


def test_it_cannot_be_offloaded() -> None:
    layer, _ = ragged(KEPT, 10)
    with pytest.raises(UnsupportedCacheError, match="cannot be offloaded"):
        layer.offload()
    assert held(layer) == KEPT


def test_reset_frees_it_and_says_so() -> None:
    layer, _ = ragged(KEPT, 10)
    append(layer, 3)
    layer.reset()
    cache = DynamicCache()
    cache.layers.append(layer)
    assert cache.get_seq_length() == 0
    assert layer.get_mask_sizes(4) == (4, 0)
    assert cache_nbytes(cache) == 0
    assert kept_lengths(cache)[0].numel() == 0
    cache.crop(0)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    layer.allow_update(Reader())
    with pytest.raises(ScopeError, match="was reset while head-wise compressed; make a new one"):
        layer.update(*states(2, 2, 1))


def test_a_cache_reaches_it_as_any_other_layer() -> None:
    layer, _ = ragged(KEPT, 10)
    cache = DynamicCache()
    cache.layers.append(layer)
    assert cache.get_seq_length() == 10
    assert kept_lengths(cache)[0].tolist() == [[4, 1], [2, 10]]
    assert cache_nbytes(cache) == 2 * 4 * DIM * 17
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    assert held(layer) == [KEPT[1], KEPT[0], KEPT[0], KEPT[1]]
    cache.batch_select_indices(torch.tensor([1, 3]))
    append(layer, 5)
    cache.crop(-5)
    assert held(layer) == KEPT


# ---- scores of tokens not yet judged -------------------------------------------------------------

INF = float("inf")


def test_scores_of_the_last_tokens_are_remembered() -> None:
    layer, _ = ragged(KEPT, 10)
    assert layer.recall(0).shape == (2, 2, 0)
    scores = torch.arange(12.0).view(2, 2, 3)
    layer.remember(scores)
    append(layer, 2)
    assert torch.equal(layer.recall(2), scores)
    append(layer, 1)  # nobody judged the two before
    assert layer.recall(1)[0, 0].tolist() == [0, 1, 2, INF, INF]
    layer.crop(-3)
    assert torch.equal(layer.recall(0), scores)
    layer.batch_select_indices(torch.tensor([1, 1, 0]))
    assert torch.equal(layer.recall(0), scores[[1, 1, 0]])


@given(st.integers(1, 3), st.integers(1, 3))
def test_scores_of_cropped_tokens_are_forgotten(n_cropped, n_new) -> None:
    layer, _ = ragged(KEPT, 10)
    append(layer, 3)
    scores = torch.arange(16.0).view(2, 2, 4)
    layer.remember(scores)
    layer.crop(-n_cropped)
    append(layer, n_new)
    assert torch.equal(layer.recall(n_new), scores[..., : 4 - n_cropped])


def test_what_comes_after_a_crop_has_not_been_judged() -> None:
    layer, _ = ragged([[[0, 1, 2], [0, 1]]], 3)
    append(layer, 3)
    layer.remember(torch.arange(6.0).view(1, 2, 3))
    layer.crop(-2)
    append(layer, 2)  # nobody judges them
    assert layer.recall(0)[0, 0].tolist() == [0, INF, INF]
