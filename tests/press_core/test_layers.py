"""Layers that have lost tokens, against lists of lists; heads of different lengths in one."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from transformers import StaticCache

import patch_impl
from press_core import Evicts, ScopeError, UnsupportedCacheError, cache_nbytes, kept_lengths
from press_core.cache import layout
from press_core.cache.layout import Blocks
from press_core.cache.pruned import CROP_TAKES_LENGTH
from press_core.cache.ragged import RESERVED
from press_core.eviction import Eviction
from tests.press_core.test_caches import cache_of
from tests.support import PROFILE, build, filled, held, left_padded, update

N_PROGRAMS = {"short": 10, "long": 1000}.get(PROFILE, 40)
DIM = 4


def states(batch, n_heads, n, seed=0):
    """Random keys and values, `(batch, n_heads, n, dim)` each."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch, n_heads, n, DIM
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def pruned(evict, n, padding=(0,), n_heads=2, dtype=torch.float32, room=None):
    """A layer that a press has pruned, and all keys and values that it was given.

    Args:
        padding: of each row, on its left; `evict` is asked about each row's tokens.
        room: for tokens that come later, in a static cache; None: in a dynamic one.
    """

    class Own(patch_impl.BasePress):
        evicts = Evicts.CHANNELS  # or less

        def compress(self, call):
            return evict(call)

    sizes = {"num_layers": 1, "num_heads": n_heads, "num_kv_heads": n_heads, "head_dim": DIM}
    model = build("llama", dtype=dtype, **sizes)
    ids, mask, positions = left_padded(len(padding), n, [*padding])
    given = {"attention_mask": mask, "position_ids": positions}
    cache = None if room is None else StaticCache(config=model.config, max_cache_len=n + room)
    (layer,) = filled(model, Own(), ids, cache, **given).layers
    (whole,) = filled(model, None, ids, **given).layers
    return layer, whole.keys, whole.values


def ragged(kept, n, **options):
    """A layer that holds the positions `kept` of each row and head out of `n`, and all states."""
    mask = torch.zeros(len(kept), len(kept[0]), n, dtype=torch.bool)
    for row, of_row in enumerate(kept):
        for head, positions in enumerate(of_row):
            mask[row, head, positions] = True
    return pruned(lambda call: Eviction.keep_per_head(call, mask), n, [0] * len(kept), **options)


def append(layer, n, seed=1):
    return update(layer, *states(layer.batch, layer.n_heads, n, seed))


# ---- drawn sequences of operations ---------------------------------------------------------------


KINDS = "ragged", "ragged", "even", "unsaid", "channels"


class AgainstLists(RuleBasedStateMachine):
    """A pruned layer, and per row and head a list of the tokens that it should hold.

    Heads hold different numbers of tokens, or as many (rows fewer, with empty slots on the left;
    nobody says which; without some channels of the keys).
    """

    @initialize(
        data=st.data(),
        kind=st.sampled_from(KINDS),
        batch=st.integers(1, 3),
        n_heads=st.integers(1, 3),
        room=st.none() | st.integers(0, 60),
    )
    def prefill(self, data, kind, batch, n_heads, room):
        n = data.draw(st.sampled_from([1, 2, 7, 20, 130]))
        self.kind, self.seen, self.recent, chosen = kind, n, 0, {}
        self.room = None if kind == "channels" else room
        empty = [data.draw(st.integers(0, n - 1)) for _ in range(batch)]
        empty = empty if kind == "even" else [0] * batch

        def evict(call):
            rows, length = call.when.batch_rows or range(batch), call.length
            n_kept = data.draw(st.integers(1, length))
            of_rows = torch.rand(len(rows), n_heads, length, generator=generator).argsort(dim=-1)
            kept = of_rows[..., :n_kept].sort().values
            eviction = Eviction.keep(call, kept)
            if kind == "ragged":
                flags = [[data.draw(some_of(n_kept)) for _ in range(n_heads)] for _ in rows]
                mask = torch.tensor(flags)
                eviction = eviction.then(Eviction.keep_per_head(eviction.next_call(), mask))
            elif kind == "channels":
                kept = torch.arange(length).expand(len(rows), n_heads, -1)
                channels = torch.tensor([0, 2]).expand(len(rows), n_heads, -1)
                eviction = Eviction.keep_channels(call, channels)
            elif kind == "unsaid":
                eviction = Eviction.from_states(call, *eviction)
            for index, row in enumerate(rows):
                chosen[row] = [empty[row] + of_head for of_head in kept[index]]
                if kind == "ragged":
                    chosen[row] = [x[m] for x, m in zip(chosen[row], mask[index], strict=True)]
            return eviction

        generator = torch.Generator().manual_seed(n)
        self.layer, keys, values = pruned(evict, n, empty, n_heads, room=self.room)
        if kind == "channels":
            keys = keys * torch.tensor([1, 0, 1, 0])
        self.rows = [
            [(at, keys[row, h, at], values[row, h, at]) for h, at in enumerate(chosen[row])]
            for row in range(batch)
        ]
        self.context = max(len(at) for row in self.rows for at, *_ in row)
        self.unsaid = kind == "unsaid" and self.context < n  # of all tokens it is clear

    def each(self, change):
        self.rows = [
            [change(b, h, *head) for h, head in enumerate(row)] for b, row in enumerate(self.rows)
        ]

    @property
    def is_ragged(self):
        return self.kind == "ragged"

    @rule(n=st.sampled_from([1, 1, 1, 2, 5, 40]))
    def update(self, n):
        keys, values = states(len(self.rows), len(self.rows[0]), n, self.seen)
        if self.room is not None and self.recent + n > self.room:
            with pytest.raises(UnsupportedCacheError, match="is full"):
                update(self.layer, keys, values)
            return
        found = update(self.layer, keys, values)
        if self.kind in ("ragged", "channels"):  # attention reads the layer itself
            assert found[0] is keys
            assert found[1] is values
        else:
            filled = [x[:, :, : self.layer.n_slots] for x in found]
            assert all(map(torch.equal, filled, self.layer.states()))
        new = torch.arange(self.seen, self.seen + n)
        self.each(
            lambda b, h, *head: tuple(
                torch.cat(x) for x in zip(head, (new, keys[b, h], values[b, h]), strict=True)
            )
        )
        self.seen, self.recent = self.seen + n, self.recent + n

    @precondition(lambda self: self.is_ragged and self.room is None)
    @precondition(lambda self: self.layer.lengths().min() > 0)
    @rule(data=st.data())
    def evict(self, data):
        """Some of the last tokens of each head, of the context or later."""
        m = data.draw(st.integers(1, int(self.layer.lengths().min())))
        gone = torch.tensor([[data.draw(some_of(m)) for _ in row] for row in self.rows])
        self.layer.evict(gone, None)
        self.each(lambda b, h, *head: tuple(torch.cat((x[:-m], x[-m:][~gone[b, h]])) for x in head))
        self.recent = 0

    @rule(data=st.data(), to_length=st.booleans())
    def crop(self, data, to_length):
        """What was evicted does not come back, so that only what came later can be taken away."""
        too_many = self.recent + data.draw(st.integers(1, 3))
        with pytest.raises(UnsupportedCacheError, match=f"{too_many} tokens.*: {self.recent} came"):
            self.layer.crop(-too_many)
        n = data.draw(st.integers(0, self.recent))
        if to_length and CROP_TAKES_LENGTH:
            self.layer.crop(self.seen + 100)  # to more than was seen
            self.layer.crop(self.seen - n)
        elif n or not CROP_TAKES_LENGTH:
            self.layer.crop(-n)
        if n:
            self.each(lambda _, __, *head: tuple(x[:-n] for x in head))
        self.seen, self.recent = self.seen - n, self.recent - n

    @rule(data=st.data(), beams=st.booleans())
    def select(self, data, beams):
        size = len(self.rows) if beams else data.draw(st.integers(1, 4))
        row = st.integers(0, len(self.rows) - 1)
        chosen = data.draw(st.lists(row, min_size=size, max_size=size))
        select = self.layer.reorder_cache if beams else self.layer.batch_select_indices
        select(torch.tensor(chosen))
        self.rows = [self.rows[row] for row in chosen]

    @precondition(lambda self: len(self.rows) <= 3)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        self.layer.batch_repeat_interleave(repeats)
        self.rows = [row for row in self.rows for _ in range(repeats)]

    @rule(deep=st.booleans())
    def copy(self, deep):
        """Goes on with a copy; what becomes of the former must not matter."""
        former = self.layer
        self.layer = copy.deepcopy(former) if deep else pickle.loads(pickle.dumps(former))
        assert type(self.layer) is type(former)
        names = "keys", "values", "slots", "channels", "recent_keys"
        mine, its = (
            [x for name in names if isinstance(x := getattr(layer, name, None), Tensor)]
            + ([layer.recent.keys, layer.recent.values] if self.is_ragged else [])
            for layer in (self.layer, former)
        )
        assert not {x.data_ptr() for x in mine if x.numel()} & {x.data_ptr() for x in its}
        former.reset()

    @invariant()
    def holds_the_same(self):
        """Rows and heads that hold less than others have empty slots on the left."""
        layer, lengths = self.layer, [[len(at) for at, *_ in row] for row in self.rows]
        n_slots = max(map(max, lengths)) if self.is_ragged else self.context + self.recent
        assert (layer.get_seq_length(), layer.n_recent) == (self.seen, self.recent)
        assert (layer.batch, layer.n_slots) == (len(self.rows), n_slots)
        before = self.seen - self.recent
        n_old = before if self.is_ragged else self.context
        columns = n_old + (self.recent + 3 if self.room is None else self.room)
        for asked in (3, torch.arange(3)):  # transformers 5.2 asks with positions
            assert layer.get_mask_sizes(asked) == (columns, before - n_old)
        assert kept_lengths(cache_of(layer))[0].tolist() == lengths
        (keys, values), positions = layer.states(), layer.all_positions()
        assert keys.shape == values.shape == (*torch.tensor(lengths).shape, n_slots, DIM)
        assert (positions is None) == self.unsaid
        for b, h in itertools.product(range(layer.batch), range(len(lengths[0]))):
            n_empty, (at, *head) = n_slots - lengths[b][h], self.rows[b][h]
            found = keys[b, h, n_empty:], values[b, h, n_empty:]
            assert all(map(torch.equal, found, head))
            if positions is not None:
                assert positions[b, h].tolist() == [-1] * n_empty + at.tolist()
            if self.is_ragged:
                assert all(map(torch.equal, layer.head(b * len(lengths[0]) + h), head))
                assert not keys[b, h, :n_empty].any()
                assert not values[b, h, :n_empty].any()

    @precondition(lambda self: self.is_ragged)
    @invariant()
    def stores_little_more_than_it_holds(self):
        """At most 3% of the context, and a few slots ahead; it knows which slots are empty."""
        layer = self.layer
        context = sum(layer.counts) - layer.n_recent * len(layer.counts)
        assert layer.keys.shape == layer.values.shape == (*layer.slots.shape, DIM)
        assert layer.slots.numel() <= 1.03 * context or not context
        assert int((layer.slots >= 0).sum()) == context
        for of_recent in (layer.recent.keys, layer.recent.values):
            heads, n = (layer.batch, layer.n_heads), layer.n_recent
            n = n if self.room is None else self.room
            assert of_recent.shape == (*heads, n + RESERVED, DIM)


def some_of(n):
    """Which of `n` tokens: all, some, or none."""
    some = st.integers(0, 2**n - 1).map(lambda bits: [bool(bits >> i & 1) for i in range(n)])
    return st.one_of(st.just([True] * n), some)


TestAgainstLists = AgainstLists.TestCase
TestAgainstLists.settings = settings(
    max_examples=N_PROGRAMS, stateful_step_count=12, derandomize=PROFILE != "long", database=None
)


@given(
    n_heads=st.integers(1, 4),
    batch=st.integers(1, 3),
    few=st.sampled_from([{"FEW": 2**18}, {"FEW": -1}, {"FEW": -1, "FEW_QUERIES": -1}]),
    data=st.data(),
)
@settings(max_examples=6 * N_PROGRAMS, derandomize=PROFILE != "long", database=None)
def test_every_head_reads_its_own_tokens_once_and_no_others(n_heads, batch, few, data):
    n = n_heads * batch
    counts = data.draw(st.lists(st.integers(0, 400), min_size=n, max_size=n))
    counts[0] += 1  # not all of them empty
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in few.items():
            patch.setattr(layout, name, limit)
        blocks = Blocks.of(counts, n_heads, 1, torch.zeros(1, DIM))
    slots = blocks.slots(counts)
    owner = torch.full((blocks.n * blocks.size,), -1)
    owner[slots] = torch.arange(n).repeat_interleave(torch.tensor(counts))
    assert int((owner >= 0).sum()) == sum(counts)
    assert len(owner) <= (1 + layout.WASTE) * sum(counts)
    n_readers = (len(blocks.heads) - blocks.n_own) // max(1, blocks.n - blocks.n_own)
    read = torch.arange(blocks.n)
    read = torch.cat((read[: blocks.n_own], read[blocks.n_own :].repeat_interleave(n_readers)))
    own = owner.view(blocks.n, blocks.size)[read] == blocks.heads[:, None]
    seen = blocks.hidden[:, 0] == 0
    assert not (seen & ~own).any()
    assert int(seen.sum()) == sum(counts)
    assert blocks.hidden[:, 0][~seen].isneginf().all()
    if blocks.of_rows:
        assert blocks.heads.tolist() == list(range(n))


# ---- one by one ----------------------------------------------------------------------------------

KEPT = [[[0, 3, 4, 9], [1]], [[2, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_states_keep_their_dtype_and_their_bits(dtype):
    layer, keys, values = ragged([[[0, 2, 3], [1]]], 5, dtype=dtype)
    new_keys, new_values = states(1, 2, 1)
    update(layer, new_keys, new_values)  # float32, as under autocast
    assert layer.keys.dtype == layer.values.dtype == layer.states()[0].dtype == dtype
    expected = torch.cat((keys[0, 0, [0, 2, 3]], new_keys[0, 0].to(dtype)))
    assert torch.equal(layer.head(0)[0], expected)
    expected = torch.cat((values[0, 1, [1]], new_values[0, 1].to(dtype)))
    assert torch.equal(layer.head(1)[1], expected)


def test_a_layer_made_in_inference_mode_goes_on_outside_of_it():
    with torch.inference_mode():
        layer, *_ = ragged([[list(range(100)), [3]]], 100)
        append(layer, 1)
    assert layer.recent.keys.is_inference()
    append(layer, 1)
    with torch.inference_mode():
        append(layer, 1)
    assert held(cache_of(layer))[0][0][1] == [3, 100, 101, 102]


def test_a_cache_reaches_it_as_any_other_layer():
    layer, *_ = ragged(KEPT, 10)
    cache = cache_of(layer)
    assert cache.get_seq_length() == 10
    assert kept_lengths(cache)[0].tolist() == [[4, 1], [2, 10]]
    assert cache_nbytes(cache) == 2 * 4 * DIM * (17 + 4 * RESERVED)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert layer.get_mask_sizes(4) == (4, 0)
    assert kept_lengths(cache)[0].numel() == 0
    cache.crop(0)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ScopeError, match=r"reset.*make a new"):
        update(layer, *states(2, 2, 1))


# ---- scores of tokens not yet judged -------------------------------------------------------------

INF = float("inf")


@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 2))
def test_what_is_known_of_the_last_tokens_is_carried_on(n_cropped, n_new, n_unjudged):
    """Of tokens taken back it is forgotten; those that came while nobody judged are not evicted."""
    layer, *_ = ragged(KEPT, 10)
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
