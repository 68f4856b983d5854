"""The layer in which every head keeps its own number of tokens, against lists of lists."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from press_core import RaggedLayer, ScopeError, UnsupportedCacheError, cache_nbytes, kept_lengths
from press_core.cache import layout
from press_core.cache.layout import Blocks
from press_core.cache.recent import AHEAD
from press_core.cache.tokens import Kept
from tests.support import reading

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
    return RaggedLayer.of(keys, values, mask, torch.arange(n).view(1, 1, -1), Kept(n_seen=n)), keys


def update(layer: RaggedLayer, *new: Tensor) -> tuple[Tensor, ...]:
    """Append `new` keys and values, as whoever attends over the layer does."""
    with reading(layer):
        return layer.update(*new)


def append(layer: RaggedLayer, n: int, seed: int = 1) -> tuple[Tensor, ...]:
    return update(layer, *states(layer.batch, layer.n_heads, n, seed, layer.keys.shape[-1]))


def held(layer: RaggedLayer) -> list[list[list[int]]]:
    """Positions per row and head, as the padded form has them."""
    rows = layer.dense()[2].tolist()
    return [[[p for p in head if p >= 0] for head in row] for row in rows]


# ---- drawn sequences of operations ---------------------------------------------------------------


class Token(NamedTuple):
    """What a head holds of one token."""

    position: int
    key: Tensor
    value: Tensor


def assert_holds(found: tuple[Tensor, ...], head: list[Token]) -> None:
    assert [len(states) for states in found] == [len(head)] * 2
    for key, value, token in zip(*found, head, strict=True):
        assert torch.equal(key, token.key)
        assert torch.equal(value, token.value)


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
        self.layer = RaggedLayer.of(keys, values, kept, positions, Kept(n_seen=n))
        self.rows = [
            [
                [Token(p, keys[b, h, p], values[b, h, p]) for p in range(n) if kept[b, h, p]]
                for h in range(n_heads)
            ]
            for b in range(batch)
        ]

    def drawn_states(self, batch: int, n_heads: int, n: int) -> tuple[Tensor, ...]:
        self.n_drawn += 1
        return states(batch, n_heads, n, self.n_drawn)

    @property
    def total(self) -> int:
        return sum(len(head) for row in self.rows for head in row)

    @rule(n=st.sampled_from([1, 1, 1, 2, 5, 40]))
    def update(self, n: int) -> None:
        keys, values = self.drawn_states(len(self.rows), len(self.rows[0]), n)
        new = update(self.layer, keys, values)
        assert new[0] is keys
        assert new[1] is values
        for b, row in enumerate(self.rows):
            for h, head in enumerate(row):
                head += [Token(self.seen + i, keys[b, h, i], values[b, h, i]) for i in range(n)]
        self.seen, self.recent = self.seen + n, self.recent + n

    @rule(steps=st.integers(5, 15))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.update(1)

    @precondition(lambda self: all(head for row in self.rows for head in row))
    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        """Some of the last tokens of each head, of the context or later."""
        m = data.draw(st.integers(1, min(len(head) for row in self.rows for head in row)))
        gone = [[data.draw(some_of(m)) for _ in row] for row in self.rows]
        self.layer.evict(torch.tensor(gone), None)
        for row, of_row in zip(self.rows, gone, strict=True):
            for head, of_head in zip(row, of_row, strict=True):
                head[-m:] = [t for t, lost in zip(head[-m:], of_head, strict=True) if not lost]
        self.recent = 0

    @rule(data=st.data(), to_length=st.booleans())
    def crop(self, data: Any, to_length: bool) -> None:
        n = data.draw(st.integers(0, self.recent))
        if to_length and CROPS_TO_LENGTH:
            self.layer.crop(self.seen - n)
        elif n or not CROPS_TO_LENGTH:
            self.layer.crop(-n)
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

    @precondition(lambda self: len(self.rows) <= 3)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats: int) -> None:
        self.layer.batch_repeat_interleave(repeats)
        self.rows = [[[*head] for head in row] for row in self.rows for _ in range(repeats)]

    @rule(deep=st.booleans())
    def copy(self, deep: bool) -> None:
        """Goes on with a copy; what becomes of the former must not matter."""
        former = self.layer
        self.layer = copy.deepcopy(former) if deep else pickle.loads(pickle.dumps(former))
        mine, its = (
            (layer.keys, layer.values, layer.slots, layer.recent.keys, layer.recent.values)
            for layer in (self.layer, former)
        )
        assert not {x.data_ptr() for x in mine} & {x.data_ptr() for x in its}
        former.reset()

    @invariant()
    def holds_the_same(self) -> None:
        layer = self.layer
        assert layer.get_seq_length() == self.seen
        assert layer.get_mask_sizes(3) == (self.seen + 3, 0)
        assert layer.get_mask_sizes(torch.arange(3)) == (self.seen + 3, 0)
        assert layer.batch == len(self.rows)
        assert layer.lengths().tolist() == [[len(head) for head in row] for row in self.rows]
        assert layer.n_recent == self.recent
        for index, head in enumerate(head for row in self.rows for head in row):
            assert_holds(layer.head(index), head)

    @invariant()
    def pads_on_the_left(self) -> None:
        keys, values, positions = self.layer.dense()
        longest = max(len(head) for row in self.rows for head in row)
        assert self.layer.n_slots == longest
        assert keys.shape == values.shape == (*positions.shape, DIM)
        assert positions.shape == (len(self.rows), len(self.rows[0]), longest)
        for b, row in enumerate(self.rows):
            for h, head in enumerate(row):
                missing = longest - len(head)
                assert positions[b, h].tolist() == [-1] * missing + [t.position for t in head]
                assert not keys[b, h, :missing].any()
                assert not values[b, h, :missing].any()
                assert_holds((keys[b, h, missing:], values[b, h, missing:]), head)

    @invariant()
    def stores_little_more_than_it_holds(self) -> None:
        """At most 3% of the context, and a few slots ahead; it knows which slots are empty."""
        layer = self.layer
        context = self.total - layer.n_recent * len(layer.counts)
        assert layer.keys.shape == layer.values.shape == (*layer.slots.shape, DIM)
        assert layer.slots.numel() <= 1.03 * context or not context
        assert int((layer.slots >= 0).sum()) == context
        for of_recent in (layer.recent.keys, layer.recent.values):
            assert of_recent.shape == (len(layer.counts), layer.n_recent + AHEAD, DIM)


def some_of(n: int) -> st.SearchStrategy[list[bool]]:
    """Which of `n` tokens: all, or some, and never none."""
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
        patch.setattr(layout, "FEW", few)
        blocks = Blocks.of(counts, n_heads, torch.zeros(1, DIM))
    slots = blocks.slots(counts)
    owner = torch.full((blocks.n * blocks.size,), -1)
    owner[slots] = torch.arange(n).repeat_interleave(torch.tensor(counts))
    assert int((owner >= 0).sum()) == sum(counts)
    assert len(owner) <= (1 + layout.WASTE) * sum(counts)
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


# ---- one by one ----------------------------------------------------------------------------------

KEPT = [[[0, 3, 4, 9], [1]], [[2, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]]


def test_tokens_may_have_positions_of_their_own_in_each_head() -> None:
    """As after another press that kept other tokens of each head."""
    keys, values = states(2, 2, 3)
    positions = torch.tensor([[[0, 2, 5], [1, 2, 3]], [[4, 5, 6], [0, 7, 8]]])
    kept = torch.tensor([[[1, 0, 1], [1, 1, 1]], [[0, 0, 1], [1, 1, 0]]]).bool()
    layer = RaggedLayer.of(keys, values, kept, positions, Kept(n_seen=9))
    assert held(layer) == [[[0, 5], [1, 2, 3]], [[6], [0, 7]]]
    append(layer, 2)
    assert held(layer) == [[[0, 5, 9, 10], [1, 2, 3, 9, 10]], [[6, 9, 10], [0, 7, 9, 10]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_states_keep_their_dtype_and_their_bits(dtype: torch.dtype) -> None:
    keys, values = (x.to(dtype) for x in states(1, 2, 5))
    kept = torch.tensor([[[1, 0, 1, 1, 0], [0, 1, 0, 0, 0]]]).bool()
    layer = RaggedLayer.of(keys, values, kept, torch.arange(5).view(1, 1, -1), Kept(n_seen=5))
    update(layer, keys[:, :, :1].float(), values[:, :, :1].float())  # as under autocast
    assert layer.keys.dtype == layer.values.dtype == layer.dense()[0].dtype == dtype
    assert torch.equal(layer.head(0)[0], keys[0, 0, [0, 2, 3, 0]])
    assert torch.equal(layer.head(1)[1], values[0, 1, [1, 0]])


@pytest.mark.parametrize("with_gradients", [True, False])
def test_gradients_reach_what_was_stored_and_what_came_later_if_asked_for(
    with_gradients: bool,
) -> None:
    keys, values, *new = (x.requires_grad_() for n in (5, 2) for x in states(1, 2, n))
    kept = torch.tensor([[[1, 0, 1, 1, 0], [0, 1, 0, 0, 0]]]).bool()
    with torch.set_grad_enabled(with_gradients):
        layer = RaggedLayer.of(keys, values, kept, torch.arange(5).view(1, 1, -1), Kept(n_seen=5))
        update(layer, *new)
    dense = layer.dense()[0]
    assert dense.requires_grad is layer.recent.keys.requires_grad is with_gradients
    if with_gradients:
        dense.sum().backward()
        assert torch.equal(keys.grad, kept.unsqueeze(-1).expand_as(keys).float())
        assert torch.equal(new[0].grad, torch.ones_like(new[0]))
        assert values.grad is None


def test_a_layer_made_in_inference_mode_goes_on_outside_of_it() -> None:
    with torch.inference_mode():
        layer, _ = ragged([[list(range(200)), [3]]], 200)
        append(layer, 1)
    assert layer.recent.keys.is_inference()
    append(layer, 1)
    with torch.inference_mode():
        append(layer, 1)
    assert held(layer)[0][1] == [3, 200, 201, 202]


def test_only_who_attends_over_it_may_append() -> None:
    layer, keys = ragged(KEPT, 10)
    new = states(2, 2, 1)
    with pytest.raises(ScopeError, match=r"attention_patch\.headwise\(model\)"):
        layer.update(*new)
    update(layer, *new)
    with pytest.raises(ScopeError, match="scope of the press"):
        layer.update(*new)
    assert layer.lengths().tolist() == [[5, 2], [3, 11]]
    assert torch.equal(layer.head(0)[0][:4], keys[0, 0, [0, 3, 4, 9]])


@pytest.mark.parametrize("remove", [4, 13])
def test_what_was_evicted_does_not_come_back(remove: int) -> None:
    layer, _ = ragged(KEPT, 10)
    append(layer, 3)
    before = held(layer)
    with pytest.raises(UnsupportedCacheError, match=f"cannot crop {remove} tokens.*: 3 came after"):
        layer.crop(-remove)
    assert held(layer) == before
    layer.crop(-3)
    assert held(layer) == KEPT
    assert layer.get_seq_length() == 10


def test_a_cache_reaches_it_as_any_other_layer() -> None:
    layer, _ = ragged(KEPT, 10)
    cache = DynamicCache()
    cache.layers.append(layer)
    assert cache.get_seq_length() == 10
    assert kept_lengths(cache)[0].tolist() == [[4, 1], [2, 10]]
    assert cache_nbytes(cache) == 2 * 4 * DIM * (17 + 4 * AHEAD)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert layer.get_mask_sizes(4) == (4, 0)
    assert kept_lengths(cache)[0].numel() == 0
    cache.crop(0)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ScopeError, match="was reset while head-wise compressed; make a new one"):
        update(layer, *states(2, 2, 1))


# ---- scores of tokens not yet judged -------------------------------------------------------------

INF = float("inf")


@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 2))
def test_what_is_known_of_the_last_tokens_is_carried_on(
    n_cropped: int, n_new: int, n_unjudged: int
) -> None:
    """Of tokens taken back it is forgotten; those that came while nobody judged are not evicted."""
    layer, _ = ragged(KEPT, 10)
    append(layer, 3)
    scores = torch.arange(16.0).view(2, 2, 4)
    layer.carry({"scores": scores})
    layer.crop(-n_cropped) if n_cropped else None
    append(layer, n_unjudged + n_new)
    known = layer.carried_to(n_new)["scores"]
    left = scores[..., : 4 - n_cropped]
    assert torch.equal(known, torch.nn.functional.pad(left, (0, n_unjudged), value=INF))
    layer.batch_select_indices(torch.tensor([1, 1, 0]))
    assert torch.equal(layer.carried_to(n_new)["scores"], known[[1, 1, 0]])
