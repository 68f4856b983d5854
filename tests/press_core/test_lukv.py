"""LU-KV against plain Python: how many tokens heads keep, and how curves are measured."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from press_core.learned.lukv import (
    best_rates,
    concave,
    exact_counts,
    head_counts,
    later_worth,
    ranks_protected,
)
from tests.press_core.drawn import KV, attention_row, drawn, drawn_call

RATES = st.floats(0, 1)


# ---- how many tokens heads keep ------------------------------------------------------------------


def slow_counts(rates: list[Fraction], length: int) -> list[int]:
    """Largest remainders, exactly; of equal ones the first head's."""
    shares = [(1 - rate) * length for rate in rates]
    counts = [math.floor(share) for share in shares]
    missing = round(sum(shares)) - sum(counts)
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[:missing]:
        counts[i] += 1
    return counts


@given(
    per_mille=st.lists(st.integers(0, 960), min_size=1, max_size=6), length=st.integers(100, 300)
)
def test_counts_of_heads_are_largest_remainders(per_mille: list[int], length: int) -> None:
    exact = [Fraction(n, 1024) for n in per_mille]  # which floats hold exactly
    assert head_counts([float(rate) for rate in exact], length) == slow_counts(exact, length)


@given(st.lists(RATES, min_size=1, max_size=8), st.integers(1, 500))
def test_no_head_is_empty_and_none_holds_more_than_there_is(
    rates: list[float], length: int
) -> None:
    counts = head_counts(rates, length)
    assert all(1 <= n <= length for n in counts)
    total = round(sum((1 - rate) * length for rate in rates))
    assert sum(counts) == max(total, len(rates))


@given(st.data())
def test_a_number_of_tokens_is_met_exactly(data: Any) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    row = st.lists(RATES, min_size=shape[1], max_size=shape[1])
    rates = data.draw(st.lists(row, min_size=shape[0], max_size=shape[0]))
    length = data.draw(st.integers(1, 200))
    n = data.draw(st.integers(1, length))
    counts = exact_counts(rates, length, n * shape[0] * shape[1])
    assert sum(map(sum, counts)) == n * shape[0] * shape[1]
    assert all(1 <= count <= length for layer in counts for count in layer)


def test_who_is_to_lose_more_loses_more_of_a_number_of_tokens_too() -> None:
    for total in (8, 60, 200, 380):
        counts = exact_counts([[0.1, 0.4], [0.6, 0.9]], 100, total)
        flat = [n for layer in counts for n in layer]
        assert flat == sorted(flat, reverse=True)
        assert len(set(flat)) > 1


# ---- how curves are measured ---------------------------------------------------------------------


def hull(gains: list[float]) -> list[float]:
    """Heights of the least concave line above the sums: the steepest chord, step by step."""
    sums = [0.0, *itertools.accumulate(gains)]
    heights, at = [0.0], 0
    while at < len(gains):
        ends = range(at + 1, len(sums))
        slope = max((sums[end] - sums[at]) / (end - at) for end in ends)
        end = max(e for e in ends if (sums[e] - sums[at]) / (e - at) >= slope - 1e-12)
        heights += [sums[at] + slope * step for step in range(1, end - at + 1)]
        at = end
    return heights[1:]


@given(st.lists(st.floats(0, 1), max_size=20))
def test_steps_are_those_of_the_concave_hull(gains: list[float]) -> None:
    steps = concave(gains)
    assert list(itertools.accumulate(steps)) == pytest.approx(hull(gains))
    assert all(one >= other - 1e-12 for one, other in itertools.pairwise(steps))


def best_by_trying(gains: Tensor, total: int) -> float:
    """What all splits of `total` tokens over the heads `(N, n)` gain at most."""
    n = gains.shape[1]
    sums = torch.cat((torch.zeros(len(gains), 1), gains.cumsum(dim=1)), dim=1)
    splits = itertools.product(range(n + 1), repeat=len(gains))
    return max(
        sum(float(sums[head, k]) for head, k in enumerate(split))
        for split in splits
        if sum(split) == total
    )


def test_the_best_budgets_are_found_where_gains_fall() -> None:
    """On concave curves the greedy choice is the optimum over all splits."""
    gains = drawn(2, 2, 6).abs().sort(dim=-1, descending=True).values
    rates = best_rates(gains, 0)
    sums = torch.cat((torch.zeros(4, 1), gains.flatten(0, 1).cumsum(dim=1)), dim=1)
    for per_cent in (10, 25, 50, 75, 90):
        counts = ((1 - rates[per_cent - 1]) * 6).round().long().flatten()
        total = round(24 * (1 - per_cent / 100))
        assert int(counts.sum()) == total
        found = sum(float(sums[head, n]) for head, n in enumerate(counts.tolist()))
        assert found == pytest.approx(best_by_trying(gains.flatten(0, 1), total))


def test_on_other_curves_budgets_follow_the_hull() -> None:
    """What a head gains late is worth reaching for, together with what lies before it."""
    gains = torch.tensor([[[0.0, 0.0, 0.0, 9.0], [2.0, 2.0, 2.0, 2.0]]], dtype=torch.float64)
    counts = ((1 - best_rates(gains, 0)) * 4).round().long()[:, 0]
    assert counts[49].tolist() == [4, 0]
    assert counts[24].tolist() == [4, 2]


@given(st.integers(0, 2**16), st.integers(0, 6), st.integers(1, 40))
def test_budgets_spend_what_there_is(seed: int, n_protected: int, length: int) -> None:
    gains = drawn(2, 3, length, seed=seed).abs()
    rates = best_rates(gains, min(n_protected, length))
    assert rates.shape == (99, 2, 3)
    assert bool((rates.diff(dim=0) >= -1e-12).all()), "who may keep more loses no token"
    for index, of_all in enumerate(rates):
        total = round(6 * length * (1 - (index + 1) / 100))
        counts = (1 - of_all) * length
        assert float(counts.sum()) == pytest.approx(total, abs=1e-6)
        if total >= 6 * n_protected:
            assert float(counts.min()) >= min(n_protected, length) - 1e-9


def test_worth_is_later_attention_times_the_norm_of_the_value() -> None:
    call, n = drawn_call(26), 20
    found = later_worth(call, n)
    for row, head in KV:
        received = torch.zeros(n, dtype=torch.float64)
        for query_head in (2 * head, 2 * head + 1):
            for token in range(n, 26):
                received += attention_row(call, row, query_head, token)[:n] / 12
        expected = received * call.values[row, head, :n].square().sum(dim=-1).sqrt()
        torch.testing.assert_close(found[row, head], expected, rtol=1e-6, atol=0)


def test_protected_tokens_come_first() -> None:
    scores, keys = drawn(1, 2, 9), drawn(1, 2, 9, 8)
    order = ranks_protected(scores, keys, 2, 3).argsort(dim=-1, descending=True, stable=True)
    assert order[0, :, :5].tolist() == [[0, 1, 6, 7, 8]] * 2
