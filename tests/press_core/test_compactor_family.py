"""Leverage, non-causal attention and Compactor against slow references, and their properties."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from press_core import AttentionCall
from press_core.observed import Positions, Query
from press_core.presses import leverage
from press_core.presses.leverage import (
    Compactor,
    LeverageScore,
    NonCausalAttn,
    leverage_scores,
    non_causal_scores,
    queries_of_all_keys,
    sketch,
)
from tests.press_core.drawn import (
    BATCH,
    DIM,
    GROUP,
    KV_HEADS,
    drawn_call,
    rotated,
    site,
)

LENGTH, SKETCH, CHUNK = 23, 5, 4
COMPACTOR = Compactor(0.3, sink_size_start=3, sink_size_end=2, chunk_size=4, sketch_dimension=5)
PRESSES: dict[str, Any] = {
    "leverage": LeverageScore(0.5, SKETCH),
    "wide sketch": LeverageScore(0.5),
    "non-causal": NonCausalAttn(0.5, CHUNK),
    "compactor": COMPACTOR,
}


def _call(length: int = LENGTH, **fields: Any) -> AttentionCall:
    """A prefill whose queries are given as they are after RoPE, of the layer 1."""
    return drawn_call(length, **{"site": site(1), "query_is_rotated": True, **fields})


def _states(call: AttentionCall) -> Tensor:
    assert call.query is not None
    return call.query.states


def _non_causal(call: AttentionCall, chunk_size: int) -> Tensor:
    return NonCausalAttn(0.5, chunk_size).score(call)


# ---- references ----------------------------------------------------------------------------------


def _leverages(keys: Tensor, projection: Tensor) -> Tensor:
    """`x (XᵀX + λI)⁻¹ xᵀ` of the centred keys times a sketch."""
    width = projection.shape[1]
    rows = (keys - keys.mean(dim=0)) @ projection / math.sqrt(width)
    gram = sum((torch.outer(x, x) for x in rows), 1e-2 * torch.eye(width).double())
    return torch.stack([x @ torch.linalg.solve(gram, x) for x in rows])


def _attention_received(queries: Tensor, keys: Tensor, values: Tensor, size: int) -> Tensor:
    """Column sums of each chunk's softmax, mean over the group, times `‖v‖`, pooled over three."""
    received = torch.zeros(len(keys)).double()
    for start in range(0, len(keys), size):
        chunk = slice(start, start + size)
        for of_head in queries:
            for query in of_head[chunk]:
                exponentials = torch.stack([key @ query for key in keys[chunk]]).exp()
                received[chunk] += exponentials / exponentials.sum() / len(queries)
    weighted = [0.0, *(received * values.square().sum(dim=-1).sqrt()).tolist(), 0.0]
    return torch.tensor([sum(weighted[j : j + 3]) / 3 for j in range(len(keys))]).double()


def _standardised(heads: list[Tensor]) -> Tensor:
    """Over all tokens of all heads of one row of the batch."""
    scores = torch.stack(heads)
    return (scores - scores.mean()) / scores.std()


def _expected_leverage(call: AttentionCall, row: int, width: int, tokens: range) -> Tensor:
    projection = sketch((KV_HEADS, DIM, width), 1, call.keys)
    heads = []
    for head in range(KV_HEADS):
        keys = torch.stack([rotated(call.keys[row, head, j], -j) for j in tokens])
        heads.append(_leverages(keys, projection[head]))
    return _standardised(heads)


def _expected_attention(call: AttentionCall, row: int, size: int, tokens: range) -> Tensor:
    heads, part = [], slice(tokens.start, tokens.stop)
    for head in range(KV_HEADS):
        group = _states(call)[row, head * GROUP : (head + 1) * GROUP, part]
        keys, values = (x[row, head, part] for x in (call.keys, call.values))
        heads.append(_attention_received(group, keys, values, size))
    return _standardised(heads)


# ---- the formulas --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 5, 12])
def test_leverage_is_the_diagonal_of_the_regularised_projection(width: int) -> None:
    call = _call()
    scores = LeverageScore(0.5, width).score(call)
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
    scores = press.score(call)
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
    given = COMPACTOR.score(replace(call, budget=4))
    asked = replace(COMPACTOR, blending=1 - 4 / LENGTH).score(call)
    torch.testing.assert_close(given, asked)


# ---- what holds for all --------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("length", [6, 7, 12])
@pytest.mark.parametrize("name", PRESSES)
def test_short_contexts_and_states_of_any_size_give_finite_scores(
    name: str, length: int, scale: float
) -> None:
    for dtype in (torch.float32, torch.float16):
        assert PRESSES[name].score(_call(length, dtype=dtype, scale=scale)).isfinite().all()


@pytest.mark.parametrize("name", ["leverage", "wide sketch", "non-causal"])
def test_a_single_token_scores_zero(name: str) -> None:
    call = _call(1, batch=1, dtype=torch.float32)
    assert PRESSES[name].score(call).isfinite().all()
    of_one_head = call.replace(keys=call.keys[:, :1] * 0, values=call.values[:, :1])
    assert not PRESSES[name].score(of_one_head).any()


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, LENGTH - 1), min_size=6, max_size=LENGTH, unique=True), st.booleans()
)
def test_a_call_that_another_press_has_pruned_is_scored_over_what_is_left(
    tokens: list[int], same_heads: bool
) -> None:
    """Keys and queries follow the tokens: the scores are those of a call with these states."""
    call = _call()
    other = tokens if same_heads else [LENGTH - 1 - token for token in tokens]
    positions = torch.tensor([[sorted(tokens), sorted(other)]]).expand(BATCH, -1, -1)
    left = call.select(positions)
    before_rope = call.keys_before_rope().gather(2, positions[..., None].expand(-1, -1, -1, DIM))
    torch.testing.assert_close(
        leverage_scores(left.keys_before_rope(), SKETCH, 1), leverage_scores(before_rope, SKETCH, 1)
    )
    for_heads = positions.repeat_interleave(GROUP, dim=1)[..., None].expand(-1, -1, -1, DIM)
    queries = _states(call).gather(2, for_heads)
    torch.testing.assert_close(
        _non_causal(left, CHUNK), non_causal_scores(queries, left.keys, left.values, CHUNK)
    )
    assert COMPACTOR.score(left).isfinite().all()


# ---- leverage ------------------------------------------------------------------------------------


def test_the_sketch_depends_on_the_layer_and_on_nothing_else() -> None:
    first, other = _call(seed=1).keys, _call(seed=2, dtype=torch.bfloat16).keys
    torch.manual_seed(3)
    drawn = sketch((2, 3), 7, first)
    torch.manual_seed(4)
    assert torch.equal(sketch((2, 3), 7, other), drawn.to(torch.bfloat16))
    assert not torch.equal(sketch((2, 3), 8, first), drawn)
    assert not torch.equal(leverage_scores(first, 3, 7), leverage_scores(first, 3, 8))


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
    call = _call(site=replace(site(1), rotary=None), position_embeddings=None)
    assert torch.equal(PRESSES["leverage"].score(call), leverage_scores(call.keys, SKETCH, 1))


# ---- non-causal attention ------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_the_rows_held_at_a_time_do_not_change_the_scores(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _non_causal(_call(), 10)
    monkeypatch.setattr(leverage, "_ROWS", rows)
    torch.testing.assert_close(_non_causal(_call(), 10), whole)


@pytest.mark.parametrize("n_known", [1, 5, 22])
def test_older_keys_are_judged_by_the_queries_that_are_known_in_turn(n_known: int) -> None:
    call = _call()
    known = _states(call)[:, :, -n_known:]
    queries = queries_of_all_keys(replace(call, query=Query(known)))
    assert queries.shape == _states(call).shape
    for position in range(LENGTH):
        expected = known[:, :, (position - LENGTH) % n_known]
        assert torch.equal(queries[:, :, position], expected)
    assert torch.equal(queries_of_all_keys(call), _states(call))


def test_a_call_of_a_decoding_step_is_scored_over_all_keys() -> None:
    """Leverage as in a prefill; attention from the queries that are known."""
    call = _call()
    assert call.at.ids is not None
    assert call.at.embeddings is not None
    cos, sin = call.at.embeddings
    step = replace(
        call,
        hidden_states=call.hidden_states[:, -4:],
        query=Query(_states(call)[:, :, -4:]),
        at=Positions((cos[:, -4:], sin[:, -4:]), call.at.ids[:, -4:], rotary=call.at.ids[:, None]),
        budget=10,
    )
    torch.testing.assert_close(PRESSES["leverage"].score(step), PRESSES["leverage"].score(call))
    all_queries = _states(call)[:, :, -4:].repeat(1, 1, 6, 1)[:, :, -LENGTH:]
    repeated = replace(call, query=Query(all_queries), budget=10)
    for name in ("non-causal", "compactor"):
        torch.testing.assert_close(PRESSES[name].score(step), PRESSES[name].score(repeated))
