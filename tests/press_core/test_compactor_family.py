"""Leverage, non-causal attention and Compactor against plain Python, and their properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hooks_impl
import patch_impl
from experiments.testbed.compare import Inputs, compare
from press_core import AttentionCall, AttentionSite, HyperparameterError, attention_sites
from press_core.presses import non_causal_attn
from press_core.presses.compactor import Compactor, compactor_scores
from press_core.presses.leverage_score import LeverageScore, leverage_scores, sketch, standardised
from press_core.presses.non_causal_attn import (
    NonCausalAttn,
    non_causal_scores,
    queries_of_all_keys,
)
from tests.support import build

BATCH, HEADS, KV_HEADS, GROUP, LENGTH, DIM = 2, 4, 2, 2, 23, 8
SKETCH, CHUNK = 5, 4
COMPACTOR = Compactor(0.3, sink_size_start=3, sink_size_end=2, chunk_size=4, sketch_dimension=5)

SCORES: dict[str, Callable[[AttentionCall], Tensor]] = {
    "leverage": lambda call: leverage_scores(call.keys_before_rope(), SKETCH, 1),
    "wide sketch": lambda call: leverage_scores(call.keys_before_rope(), 48, 1),
    "non-causal": lambda call: _non_causal(call, CHUNK),
    "compactor": lambda call: compactor_scores(call, COMPACTOR),
}


# ---- calls made of small tensors -----------------------------------------------------------------


@lru_cache
def _site() -> AttentionSite:
    model = build("llama", num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    return replace(attention_sites(model)[0], layer_idx=1)


def _call(
    seed: int = 0, length: int = LENGTH, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> AttentionCall:
    """A prefill whose states are drawn; the query is given as it is after RoPE."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        states = torch.randn(BATCH, heads, length, DIM, generator=generator, dtype=torch.float64)
        return (scale * states).to(dtype)

    positions = torch.arange(length)[None]
    rotary = _site().rotary
    assert rotary is not None
    return AttentionCall(
        site=_site(),
        hidden_states=torch.zeros(BATCH, length, HEADS * DIM, dtype=dtype),
        keys=draw(KV_HEADS),
        values=draw(KV_HEADS),
        position_embeddings=rotary.embeddings(torch.zeros(1, dtype=dtype), positions),
        position_ids=positions,
        query=draw(HEADS),
        query_is_rotated=True,
    )


def _row(call: AttentionCall, row: int) -> AttentionCall:
    """The same prefill of one row of the batch alone."""
    assert call.query is not None
    one = slice(row, row + 1)
    states = {name: getattr(call, name)[one] for name in ("hidden_states", "keys", "values")}
    return replace(call, **states, query=call.query[one])


def _non_causal(call: AttentionCall, chunk_size: int) -> Tensor:
    return non_causal_scores(queries_of_all_keys(call), call.keys, call.values, chunk_size)


# ---- plain Python, one number at a time ----------------------------------------------------------

Vector = list[float]
Matrix = list[Vector]


def _dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _rotated_back(x: Vector, position: int, theta: float = 10000.0) -> Vector:
    """RoPE undone, channels paired by halves as in Llama."""
    half = len(x) // 2
    out = [0.0] * len(x)
    for i in range(half):
        angle = -position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return out


def _solved(matrix: Matrix, right: Vector) -> Vector:
    """Gauss-Jordan elimination with pivoting."""
    n = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(n):
        pivot = max(range(column, n), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(n):
            if i != column:
                factor = rows[i][column] / rows[column][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [rows[i][n] / rows[i][i] for i in range(n)]


def _leverages(keys: Matrix, projection: Matrix) -> Vector:
    """`x (XᵀX + λI)⁻¹ xᵀ` of the centred keys times a sketch."""
    width = len(projection[0])
    mean = [math.fsum(column) / len(keys) for column in zip(*keys, strict=True)]
    centred = [[x - m for x, m in zip(key, mean, strict=True)] for key in keys]
    columns = [list(column) for column in zip(*projection, strict=True)]
    rows = [[_dot(key, column) / math.sqrt(width) for column in columns] for key in centred]
    sketched = [list(column) for column in zip(*rows, strict=True)]
    gram = [[_dot(a, b) for b in sketched] for a in sketched]
    for i in range(width):
        gram[i][i] += 1e-2
    return [_dot(x, _solved(gram, x)) for x in rows]


def _attention_received(queries: list[Matrix], keys: Matrix, values: Matrix, size: int) -> Vector:
    """Column sums of each chunk's softmax, mean over the group, times `‖v‖`, pooled over three."""
    weighted = [0.0] * len(keys)
    for position in range(len(keys)):
        start = position - position % size
        chunk = range(start, min(start + size, len(keys)))
        for heads_queries in queries:
            logits = [_dot(heads_queries[position], keys[j]) for j in chunk]
            total = math.fsum(math.exp(x - max(logits)) for x in logits)
            for j, logit in zip(chunk, logits, strict=True):
                weighted[j] += math.exp(logit - max(logits)) / total / len(queries)
    weighted = [x * math.sqrt(_dot(v, v)) for x, v in zip(weighted, values, strict=True)]
    padded = [0.0, *weighted, 0.0]
    return [math.fsum(padded[j : j + 3]) / 3 for j in range(len(keys))]


def _standardised(heads: list[Vector]) -> Tensor:
    """Over all tokens of all heads of one row of the batch."""
    flat = [x for scores in heads for x in scores]
    mean = math.fsum(flat) / len(flat)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / (len(flat) - 1))
    return torch.tensor([[(x - mean) / deviation for x in scores] for scores in heads]).double()


def _expected_leverage(
    call: AttentionCall, row: int, width: int, tokens: range, layer_idx: int = 1
) -> Tensor:
    projection = sketch((KV_HEADS, DIM, width), layer_idx, call.keys).tolist()
    heads = []
    for head in range(KV_HEADS):
        keys = [_rotated_back(call.keys[row, head, j].tolist(), j) for j in tokens]
        heads.append(_leverages(keys, projection[head]))
    return _standardised(heads)


def _expected_attention(call: AttentionCall, row: int, size: int, tokens: range) -> Tensor:
    assert call.query is not None
    heads, part = [], slice(tokens.start, tokens.stop)
    for head in range(KV_HEADS):
        group = call.query[row, head * GROUP : (head + 1) * GROUP, part].tolist()
        keys, values = (x[row, head, part].tolist() for x in (call.keys, call.values))
        heads.append(_attention_received(group, keys, values, size))
    return _standardised(heads)


# ---- the formulas --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 5, 12])
def test_leverage_is_the_diagonal_of_the_regularised_projection(width: int) -> None:
    call = _call()
    scores = leverage_scores(call.keys_before_rope(), width, 1)
    for row in range(BATCH):
        expected = _expected_leverage(call, row, width, range(LENGTH))
        torch.testing.assert_close(scores[row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 4, LENGTH - 1, LENGTH, 100])
def test_non_causal_attention_is_an_explicit_softmax_in_each_chunk(size: int) -> None:
    call = _call()
    scores = _non_causal(call, size)
    for row in range(BATCH):
        expected = _expected_attention(call, row, size, range(LENGTH))
        torch.testing.assert_close(scores[row], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("ends", [(3, 2), (0, 0), (4, 0), (0, 1), (20, 2)])
@pytest.mark.parametrize("blending", [None, 0.0, 2.0])
def test_compactor_blends_both_between_the_ends(
    ends: tuple[int, int], blending: float | None
) -> None:
    call, (first, last) = _call(), ends
    press = replace(COMPACTOR, sink_size_start=first, sink_size_end=last, blending=blending)
    scores = compactor_scores(call, press)
    middle = range(first, LENGTH - last)
    weight = 0.3 if blending is None else blending
    for row in range(BATCH):
        if len(middle) > 1:
            leverage = _expected_leverage(call, row, SKETCH, middle)
            expected = weight * leverage + _expected_attention(call, row, CHUNK, middle)
            judged = scores[row, :, middle.start : middle.stop]
            torch.testing.assert_close(judged, expected, atol=1e-5, rtol=1e-4)
        protected = [j for j in range(LENGTH) if j not in middle]
        if protected:
            inside = scores[row, :, middle.start : middle.stop].max()
            assert scores[row, :, protected].min() > inside


def test_the_blending_is_the_share_that_is_evicted_where_the_budget_comes_from_outside() -> None:
    call = _call()
    given = compactor_scores(replace(call, budget=4), COMPACTOR)
    asked = compactor_scores(call, replace(COMPACTOR, blending=1 - 4 / LENGTH))
    torch.testing.assert_close(given, asked)


# ---- what holds for all --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_single_precision_and_finite(name: str, dtype: torch.dtype) -> None:
    scores = SCORES[name](_call(dtype=dtype))
    assert scores.shape == (BATCH, KV_HEADS, LENGTH)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("length", [6, 7, 12])
@pytest.mark.parametrize("name", SCORES)
def test_short_contexts_and_states_of_any_size_give_finite_scores(
    name: str, length: int, scale: float
) -> None:
    for dtype in (torch.float32, torch.float16):
        scores = SCORES[name](_call(length=length, dtype=dtype, scale=scale))
        assert scores.isfinite().all()


@pytest.mark.parametrize("fill", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("name", SCORES)
def test_states_that_are_all_alike_give_finite_scores(name: str, fill: float) -> None:
    call = _call(dtype=torch.float16)
    assert call.query is not None
    alike = [torch.full_like(x, fill) for x in (call.keys, call.values, call.query)]
    scores = SCORES[name](replace(call, keys=alike[0], values=alike[1], query=alike[2]))
    assert scores.isfinite().all()


@pytest.mark.parametrize("name", ["leverage", "wide sketch", "non-causal"])
def test_a_single_token_scores_zero(name: str) -> None:
    for n_kv in (1, 2):
        call = _call(length=1, dtype=torch.float32)
        alone = replace(_row(call, 0), keys=call.keys[:1, :n_kv] * 0, values=call.values[:1, :n_kv])
        scores = SCORES[name](alone)
        assert scores.isfinite().all()
        if n_kv == 1:
            assert not scores.any()


@pytest.mark.parametrize("name", SCORES)
def test_a_row_of_a_batch_scores_as_it_does_alone(name: str) -> None:
    call = _call()
    scores = SCORES[name](call)
    for row in range(BATCH):
        torch.testing.assert_close(SCORES[name](_row(call, row))[0], scores[row])


@pytest.mark.parametrize("name", SCORES)
def test_scoring_changes_none_of_its_inputs(name: str) -> None:
    call, untouched = _call(dtype=torch.float32), _call(dtype=torch.float32)
    before = torch.get_rng_state()
    SCORES[name](call)
    assert torch.equal(torch.get_rng_state(), before)
    for state in ("keys", "values", "query"):
        assert torch.equal(getattr(call, state), getattr(untouched, state))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, LENGTH - 1), min_size=6, max_size=LENGTH, unique=True), st.booleans()
)
def test_a_call_that_another_press_has_pruned_is_scored_over_what_is_left(
    tokens: list[int], same_heads: bool
) -> None:
    """Keys and queries follow the tokens: the scores are those of a call with these states."""
    call = _call()
    assert call.query is not None
    other = tokens if same_heads else [LENGTH - 1 - token for token in tokens]
    positions = torch.tensor([[sorted(tokens), sorted(other)]]).expand(BATCH, -1, -1)
    left = call.select(positions)
    before_rope = call.keys_before_rope().gather(2, positions[..., None].expand(-1, -1, -1, DIM))
    torch.testing.assert_close(
        leverage_scores(left.keys_before_rope(), SKETCH, 1), leverage_scores(before_rope, SKETCH, 1)
    )
    for_heads = positions.repeat_interleave(GROUP, dim=1)[..., None].expand(-1, -1, -1, DIM)
    queries = call.query.gather(2, for_heads)
    torch.testing.assert_close(
        _non_causal(left, CHUNK), non_causal_scores(queries, left.keys, left.values, CHUNK)
    )
    assert compactor_scores(left, COMPACTOR).isfinite().all()


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        (LeverageScore, "sketch_dimension", 0),
        (LeverageScore, "compression_ratio", 1.0),
        (NonCausalAttn, "chunk_size", 0),
        (NonCausalAttn, "compression_ratio", -0.1),
        (Compactor, "sink_size_start", -1),
        (Compactor, "sink_size_end", -1),
        (Compactor, "chunk_size", 0),
        (Compactor, "sketch_dimension", 0),
        (Compactor, "blending", -0.5),
        (Compactor, "blending", math.nan),
        (Compactor, "compression_ratio", math.nan),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value(
    method: Any, field: str, value: float
) -> None:
    with pytest.raises(HyperparameterError, match=f"{field}={value}.*must be"):
        method(**{field: value})


def test_compactor_leaves_whole_what_is_no_longer_than_its_two_ends() -> None:
    press = Compactor(sink_size_start=5, sink_size_end=2)
    assert not press.is_long_enough(7)
    assert press.is_long_enough(8)
    assert Compactor(sink_size_start=0, sink_size_end=0).is_long_enough(1)


# ---- leverage ------------------------------------------------------------------------------------


def test_leverage_does_not_see_what_all_keys_share() -> None:
    keys = _call().keys
    shifted = keys + 100 * torch.randn(BATCH, KV_HEADS, 1, DIM, dtype=keys.dtype)
    scores = leverage_scores(keys, SKETCH, 0)
    torch.testing.assert_close(leverage_scores(shifted, SKETCH, 0), scores)


def test_leverage_does_not_see_the_unit_of_keys_that_dwarf_the_ridge() -> None:
    keys = _call().keys
    scores = leverage_scores(1e4 * keys, SKETCH, 0)
    torch.testing.assert_close(leverage_scores(1e5 * keys, SKETCH, 0), scores)


def test_leverage_finds_the_key_that_others_cannot_make_up() -> None:
    keys = _call().keys.clone()
    keys[..., 0] = 0
    keys[:, :, 7, 0] = 3
    assert (leverage_scores(keys, 16, 0).argmax(dim=-1) == 7).all()


def test_the_sketch_depends_on_the_layer_and_on_nothing_else() -> None:
    first, other = _call(seed=1).keys, _call(seed=2, dtype=torch.bfloat16).keys
    torch.manual_seed(3)
    drawn = sketch((2, 3), 7, first)
    torch.manual_seed(4)
    assert torch.equal(sketch((2, 3), 7, other), drawn.to(torch.bfloat16))
    assert not torch.equal(sketch((2, 3), 8, first), drawn)
    assert not torch.equal(leverage_scores(first, 3, 7), leverage_scores(first, 3, 8))


def test_each_head_has_its_own_sketch_and_all_rows_share_it() -> None:
    keys = _call().keys[:1, :1].expand(BATCH, KV_HEADS, -1, -1)
    scores = leverage_scores(keys, 3, 0)
    assert torch.equal(scores[0], scores[1])
    assert not torch.allclose(scores[:, 0], scores[:, 1])


@pytest.mark.parametrize("size", [1.0, 1e4, 1e7])
@pytest.mark.parametrize("length", [3, 60, 3000])
def test_leverage_stands_keys_of_low_rank_however_large(length: int, size: float) -> None:
    for rank in (1, 2):
        generator = torch.Generator().manual_seed(rank)
        along = torch.randn(1, 2, length, rank, generator=generator)
        keys = size * (along @ torch.randn(1, 2, rank, 64, generator=generator) + 1000)
        for width in (2, 48):
            assert leverage_scores(keys, width, 0).isfinite().all()


def test_leverage_works_without_rope() -> None:
    call = replace(_call(), site=replace(_site(), rotary=None), position_embeddings=None)
    assert torch.equal(SCORES["leverage"](call), leverage_scores(call.keys, SKETCH, 1))


def test_scores_are_standardised_over_the_heads_of_each_row() -> None:
    scores = standardised(torch.randn(3, 2, 50, dtype=torch.float64) * 7 + 5)
    torch.testing.assert_close(scores.mean(dim=(1, 2)), torch.zeros(3).double())
    torch.testing.assert_close(scores.flatten(1).std(dim=1), torch.ones(3).double())
    assert not standardised(torch.full((1, 2, 3), 4.0)).any()


# ---- non-causal attention ------------------------------------------------------------------------


def test_attention_does_not_see_what_all_keys_share() -> None:
    call = _call()
    shifted = replace(call, keys=call.keys + torch.randn(BATCH, KV_HEADS, 1, DIM).double())
    torch.testing.assert_close(_non_causal(shifted, CHUNK), _non_causal(call, CHUNK))


def test_the_unit_of_the_values_does_not_count() -> None:
    call = _call()
    larger = replace(call, values=50 * call.values)
    torch.testing.assert_close(_non_causal(larger, CHUNK), _non_causal(call, CHUNK))


def test_later_queries_judge_earlier_keys_of_their_chunk_and_of_no_other() -> None:
    keys, queries = torch.zeros(1, 1, 8, DIM), torch.zeros(1, 1, 8, DIM)
    queries[..., 3, 0] = keys[..., 1, 0] = keys[..., 5, 0] = 9.0
    scores = non_causal_scores(queries, keys, torch.ones_like(keys), 4)
    assert scores[0, 0, 1] > scores[0, 0, 5]
    torch.testing.assert_close(scores[0, 0, 5], scores[0, 0, 6])


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_the_rows_held_at_a_time_do_not_change_the_scores(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _non_causal(_call(), 10)
    monkeypatch.setattr(non_causal_attn, "_ROWS", rows)
    torch.testing.assert_close(_non_causal(_call(), 10), whole)


def test_products_that_half_precision_cannot_hold_give_finite_scores() -> None:
    call = _call(dtype=torch.float16, scale=200.0)
    assert call.query is not None
    assert (call.query[:, ::GROUP] @ call.keys.mT).isinf().any()
    assert _non_causal(call, CHUNK).isfinite().all()


@pytest.mark.parametrize("n_known", [1, 5, 22])
def test_older_keys_are_judged_by_the_queries_that_are_known_in_turn(n_known: int) -> None:
    call = _call()
    assert call.query is not None
    known = call.query[:, :, -n_known:]
    queries = queries_of_all_keys(replace(call, query=known))
    assert queries.shape == call.query.shape
    for position in range(LENGTH):
        expected = known[:, :, (position - LENGTH) % n_known]
        assert torch.equal(queries[:, :, position], expected)
    assert torch.equal(queries_of_all_keys(call), call.query)


def test_a_call_of_a_decoding_step_is_scored_over_all_keys() -> None:
    """Leverage as in a prefill; attention from the queries that are known."""
    call = _call()
    assert call.query is not None
    assert call.position_ids is not None
    assert call.position_embeddings is not None
    cos, sin = call.position_embeddings
    step = replace(
        call,
        hidden_states=call.hidden_states[:, -4:],
        query=call.query[:, :, -4:],
        position_ids=call.position_ids[:, -4:],
        position_embeddings=(cos[:, -4:], sin[:, -4:]),
        rotary_positions=call.position_ids[:, None],
        budget=10,
    )
    torch.testing.assert_close(SCORES["leverage"](step), SCORES["leverage"](call))
    all_queries = call.query[:, :, -4:].repeat(1, 1, 6, 1)[:, :, -LENGTH:]
    repeated = replace(call, query=all_queries, budget=10)
    for name in ("non-causal", "compactor"):
        torch.testing.assert_close(SCORES[name](step), SCORES[name](repeated))


# ---- both mechanisms -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gpt2"])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LeverageScorePress", {}),
        ("NonCausalAttnPress", {}),
        ("NonCausalAttnPress", {"chunk_size": 12}),
        ("CompactorPress", {"chunk_size": 12}),
    ],
)
def test_hooks_and_patches_leave_the_same_bits(
    name: str, fields: dict[str, Any], family: str, dtype: torch.dtype
) -> None:
    model = build(family, dtype=dtype)
    inputs = Inputs.random(model.config.vocab_size, lengths=(40, 23, 9))
    hook, patch = (impl.PRESSES[name](0.5, **fields) for impl in (hooks_impl, patch_impl))
    difference = compare(model, hook, patch, inputs)
    assert difference is None, str(difference)
