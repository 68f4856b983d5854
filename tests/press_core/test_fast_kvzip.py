"""Fast KVzip against plain Python, and the learning of its gates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from press_core import AttentionCall, PressError, Tokens
from press_core.learned.fast_kvzip import FastKVzip, Gate, KVzipGates
from press_core.tiles import NUMBERS
from tests.press_core.drawn import (
    BATCH,
    GROUP,
    HEADS,
    KV,
    KV_HEADS,
    Prepared,
    drawn,
    drawn_call,
    fitted,
    site,
)

RANK, N_BASE, LENGTH = 5, 4, 31
GATES = fitted(KVzipGates, rank=RANK, n_base=N_BASE)
GATES = replace(GATES, query_norm=1 + GATES.query_norm / 4, key_norm=1 + GATES.key_norm / 4)
ALL = FastKVzip(0.5, n_sink=0, window_ratio=0)
"""Protects no token."""


def a_call(length: int = LENGTH, **fields: Any) -> AttentionCall:
    return drawn_call(length, **{"site": site(1), "scope": Prepared(GATES), **fields})


def slow_gate(given: Gate, head: int, state: Tensor) -> float:
    """The formula of the paper for one token and KV head."""

    def rms(vector: Tensor, weight: Tensor) -> Tensor:
        return weight * vector / (vector @ vector / len(vector) + 1e-6).sqrt()

    key = rms(given.key_weight[head] @ state, given.key_norm)
    found = []
    for query_head in range(head * GROUP, (head + 1) * GROUP):
        query = given.query_weight[query_head] @ state + given.query_bias[query_head]
        query = rms(query, given.query_norm)
        logit = key @ query / math.sqrt(RANK) + given.bias[query_head]
        base = [row @ query / math.sqrt(RANK) for row in given.base[head]]
        found.append(1 / (1 + sum(math.exp(b - logit) for b in base)))
    return sum(found) / GROUP


def test_a_gate_is_the_formula_of_the_paper() -> None:
    call = a_call()
    scores = ALL.scores(call)
    assert scores.shape == (BATCH, KV_HEADS, LENGTH)
    for row, head in KV:
        states = call.hidden_states[row]
        expected = [slow_gate(GATES.of_layer(1), head, state) for state in states]
        assert scores[row, head].tolist() == pytest.approx(expected)


def test_long_contexts_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    call = a_call()
    whole = GATES.of_layer(1)(call.hidden_states)
    monkeypatch.setitem(NUMBERS, "cpu", 7 * BATCH * HEADS * RANK)
    torch.testing.assert_close(ALL.scores(call), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_probabilities_whatever_the_states(dtype: torch.dtype, scale: float) -> None:
    states = (a_call().hidden_states * scale).to(dtype)
    steep = GATES.of_layer(0)._replace(bias=1000 * drawn(HEADS))  # exp overflows
    for gate in (GATES.of_layer(0), steep):
        scores = gate(states)
        assert scores.dtype == torch.float32
        assert bool(((scores >= 0) & (scores <= 1)).all())


def test_states_that_are_no_numbers_are_refused() -> None:
    call = a_call()
    call.hidden_states[1, 3, 0] = float("inf")
    with pytest.raises(PressError, match="says NaN of some tokens"):
        ALL.scores(call)


def test_scores_follow_the_keys_that_are_left() -> None:
    call = a_call()
    positions = torch.rand(BATCH, KV_HEADS, LENGTH).topk(7).indices.sort().values
    left = ALL.scores(call.select(positions))
    torch.testing.assert_close(left, ALL.scores(call).gather(-1, positions))


@pytest.mark.parametrize(
    ("length", "window"), [(10, 0), (99, 1), (100, 2), (31_999, 639), (32_000, 4096)]
)
def test_the_window_is_a_share_of_short_contexts(length: int, window: int) -> None:
    assert FastKVzip(0.5).window(length) == window


def test_sinks_and_window_stay_above_all_others() -> None:
    scores = FastKVzip(0.5, n_sink=3, window_ratio=0.2).scores(a_call())
    protected = [0, 1, 2, *range(LENGTH - 6, LENGTH)]
    others = [token for token in range(LENGTH) if token not in protected]
    assert float(scores[..., others].max()) < float(scores[..., protected].min())
    assert torch.equal(scores[0, 0, protected], scores[1, 1, protected])


# ---- budgets -------------------------------------------------------------------------------------


def slow_choice(scores: list[Tensor], n: int) -> list[list[set[int]]]:
    """The best token of each head, then the best of all heads of all layers."""
    heads = [(layer, head) for layer in range(len(scores)) for head in range(len(scores[layer]))]
    best = {(i, h): int(scores[i][h].argmax()) for i, h in heads}
    rest = [
        (float(scores[i][h, token]), i, h, token)
        for i, h in heads
        for token in range(scores[i].shape[1])
        if token != best[i, h]
    ]
    kept = [[{best[i, h]} for h in range(len(scores[i]))] for i in range(len(scores))]
    for _, i, h, token in sorted(rest, reverse=True)[: n - len(heads)]:
        kept[i][h].add(token)
    return kept


@pytest.mark.parametrize("ratio", [0.01, 0.33, 0.5, 0.9, 0.97, 0.999])
@pytest.mark.parametrize("lengths", [(40, 40, 40), (40, 12, 25)])
def test_heads_of_all_layers_share_a_budget(ratio: float, lengths: tuple[int, ...]) -> None:
    """Layers may differ in length, where another press acted before."""
    scores = [drawn(KV_HEADS, n, seed=i).sigmoid() for i, n in enumerate(lengths)]
    chosen = FastKVzip(ratio).choose(scores)
    size = KV_HEADS * sum(lengths)
    n = max(KV_HEADS * len(lengths), size - int(size * ratio))
    assert sum(int(layer.sum()) for layer in chosen) == n
    found = [[set(head.nonzero()[:, 0].tolist()) for head in layer] for layer in chosen]
    assert found == slow_choice(scores, n)


@pytest.mark.parametrize("tokens", [1, 7, 40, 50])
def test_a_number_of_tokens_is_met_on_average(tokens: int) -> None:
    scores = [drawn(KV_HEADS, n).sigmoid() for n in (40, 12)]
    chosen = FastKVzip(Tokens(tokens)).choose(scores)
    expected = KV_HEADS * (min(tokens, 40) + min(tokens, 12))
    assert sum(int(layer.sum()) for layer in chosen) == expected
