"""Leverage, non-causal attention and Compactor where tokens are few, gone or old."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
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
)
from tests.press_core.drawn import BATCH, DIM, GROUP, drawn_call, site

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


def _non_causal(call: AttentionCall, chunk_size: int) -> Tensor:
    return NonCausalAttn(0.5, chunk_size).score(call)


def test_the_blending_is_the_share_that_is_evicted_where_the_budget_comes_from_outside() -> None:
    call = _call()
    given = COMPACTOR.score(replace(call, budget=4))
    asked = replace(COMPACTOR, blending=1 - 4 / LENGTH).score(call)
    torch.testing.assert_close(given, asked)


@pytest.mark.parametrize("name", ["leverage", "wide sketch", "non-causal"])
def test_a_single_token_scores_zero(name: str) -> None:
    call = _call(1, batch=1, dtype=torch.float32)
    assert PRESSES[name].score(call).isfinite().all()
    of_one_head = call.replace(keys=call.keys[:, :1] * 0, values=call.values[:, :1])
    assert not PRESSES[name].score(of_one_head).any()


@pytest.mark.parametrize("same_heads", [True, False])
def test_a_call_that_another_press_has_pruned_is_scored_over_what_is_left(same_heads: bool) -> None:
    """Keys and queries follow the tokens: the scores are those of a call with these states."""
    call, tokens = _call(), torch.randperm(LENGTH)[:9].sort().values
    other = tokens if same_heads else LENGTH - 1 - tokens.flip(0)
    positions = torch.stack((tokens, other)).expand(BATCH, -1, -1)
    left = call.select(positions)
    before_rope = call.keys_before_rope().gather(2, positions[..., None].expand(-1, -1, -1, DIM))
    torch.testing.assert_close(
        leverage_scores(left.keys_before_rope(), SKETCH, 1), leverage_scores(before_rope, SKETCH, 1)
    )
    for_heads = positions.repeat_interleave(GROUP, dim=1)[..., None].expand(-1, -1, -1, DIM)
    queries = call.query.states.gather(2, for_heads)
    torch.testing.assert_close(
        _non_causal(left, CHUNK), non_causal_scores(queries, left.keys, left.values, CHUNK)
    )
    assert COMPACTOR.score(left).isfinite().all()


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


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_the_rows_held_at_a_time_do_not_change_the_scores(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _non_causal(_call(), 10)
    monkeypatch.setattr(leverage, "_ROWS", rows)
    torch.testing.assert_close(_non_causal(_call(), 10), whole)


def test_a_call_of_a_decoding_step_is_scored_over_all_keys() -> None:
    """Leverage as in a prefill; attention from the queries that are known."""
    call = _call()
    cos, sin = call.at.embeddings
    step = replace(
        call,
        hidden_states=call.hidden_states[:, -4:],
        query=Query(call.query.states[:, :, -4:]),
        at=Positions((cos[:, -4:], sin[:, -4:]), call.at.ids[:, -4:], rotary=call.at.ids[:, None]),
        budget=10,
    )
    torch.testing.assert_close(PRESSES["leverage"].score(step), PRESSES["leverage"].score(call))
    all_queries = call.query.states[:, :, -4:].repeat(1, 1, 6, 1)[:, :, -LENGTH:]
    repeated = replace(call, query=Query(all_queries), budget=10)
    for name in ("non-causal", "compactor"):
        torch.testing.assert_close(PRESSES[name].score(step), PRESSES[name].score(repeated))
