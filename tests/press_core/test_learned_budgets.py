"""Fast KVzip and LU-KV against plain Python: scores, and how many tokens heads keep."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import patch_impl
from press_core import PressError, Tokens
from press_core.learned.fast_kvzip import FastKVzip, KVzipGates
from press_core.learned.lukv import best_rates, concave, exact_counts, future_worth, head_counts
from press_core.tiles import NUMBERS
from tests.press_core.drawn import (
    BATCH,
    GROUP,
    HEADS,
    KV,
    KV_HEADS,
    Prepared,
    attention_row,
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


def a_call(length=LENGTH, **fields):
    """Of layer 1."""
    return drawn_call(length, **{"site": site(1), "scope": Prepared(GATES), **fields})


def slow_gate(given, head, state):
    """The formula of the paper for one token and KV head."""

    def rms(vector, weight):
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


def test_a_gate_is_the_formula_of_the_paper():
    call = a_call()
    scores = ALL.scores(call)
    assert scores.shape == (BATCH, KV_HEADS, LENGTH)
    for row, head in KV:
        states = call.hidden_states[row]
        expected = [slow_gate(GATES.of_layer(1), head, state) for state in states]
        assert scores[row, head].tolist() == pytest.approx(expected)


def test_long_contexts_are_scored_in_parts(monkeypatch):
    call = a_call()
    whole = GATES.of_layer(1)(call.hidden_states)
    monkeypatch.setitem(NUMBERS, "cpu", 7 * BATCH * HEADS * RANK)
    torch.testing.assert_close(ALL.scores(call), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_probabilities_whatever_the_states(dtype, scale):
    states = (a_call().hidden_states * scale).to(dtype)
    steep = GATES.of_layer(0)._replace(bias=1000 * drawn(HEADS))  # exp overflows
    for gate in (GATES.of_layer(0), steep):
        scores = gate(states)
        assert scores.dtype == torch.float32
        assert bool(((scores >= 0) & (scores <= 1)).all())


def test_states_that_are_no_numbers_are_refused():
    call = a_call()
    call.hidden_states[1, 3, 0] = float("inf")
    with pytest.raises(PressError, match="returned NaN"):
        ALL.scores(call)


@pytest.mark.parametrize(
    ("length", "window"), [(10, 0), (99, 1), (100, 2), (31_999, 639), (32_000, 4096)]
)
def test_the_window_is_a_share_of_short_contexts(length, window):
    assert FastKVzip(0.5).window(length) == window


def test_sinks_and_window_stay_above_all_others():
    scores = FastKVzip(0.5, n_sink=3, window_ratio=0.2).scores(a_call())
    protected = [0, 1, 2, *range(LENGTH - 6, LENGTH)]
    others = [token for token in range(LENGTH) if token not in protected]
    assert float(scores[..., others].max()) < float(scores[..., protected].min())
    assert torch.equal(scores[0, 0, protected], scores[1, 1, protected])


# ---- budgets -------------------------------------------------------------------------------------


def slow_choice(scores, n):
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


@pytest.mark.parametrize(
    "amount", [0.01, 0.33, 0.5, 0.9, 0.97, 0.999, *map(Tokens, (1, 7, 40, 50))]
)
@pytest.mark.parametrize("lengths", [(40, 40, 40), (40, 12, 25), (40, 12)])
def test_heads_of_all_layers_share_a_budget(amount, lengths):
    """Layers may differ in length, where another press acted before."""
    scores = [drawn(KV_HEADS, n, seed=i).sigmoid() for i, n in enumerate(lengths)]
    chosen = FastKVzip(amount).choose(scores)
    size = KV_HEADS * sum(lengths)
    if isinstance(amount, Tokens):  # met on average
        n = KV_HEADS * sum(min(amount.n, length) for length in lengths)
    else:
        n = max(KV_HEADS * len(lengths), size - int(size * amount))
    assert sum(int(layer.sum()) for layer in chosen) == n
    found = [[set(head.nonzero()[:, 0].tolist()) for head in layer] for layer in chosen]
    assert found == slow_choice(scores, n)


# ---- LU-KV: how many tokens heads keep, and how curves are measured -----------------------------

RATES = st.floats(0, 1)


# ---- how many tokens heads keep ------------------------------------------------------------------


def slow_counts(rates, length):
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
def test_counts_of_heads_are_largest_remainders(per_mille, length):
    exact = [Fraction(n, 1024) for n in per_mille]  # which floats hold exactly
    assert head_counts([float(rate) for rate in exact], length) == slow_counts(exact, length)


@given(st.lists(RATES, min_size=1, max_size=8), st.integers(1, 500))
def test_no_head_is_empty_and_none_holds_more_than_there_is(rates, length):
    counts = head_counts(rates, length)
    assert all(1 <= n <= length for n in counts)
    total = round(sum((1 - rate) * length for rate in rates))
    assert sum(counts) == max(total, len(rates))


@given(st.data())
def test_a_number_of_tokens_is_met_exactly(data):
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    row = st.lists(RATES, min_size=shape[1], max_size=shape[1])
    rates = data.draw(st.lists(row, min_size=shape[0], max_size=shape[0]))
    length = data.draw(st.integers(1, 200))
    n = data.draw(st.integers(1, length))
    counts = exact_counts(rates, length, n * shape[0] * shape[1])
    assert sum(map(sum, counts)) == n * shape[0] * shape[1]
    assert all(1 <= count <= length for layer in counts for count in layer)


def test_who_is_to_lose_more_loses_more_of_a_number_of_tokens_too():
    for total in (8, 60, 200, 380):
        counts = exact_counts([[0.1, 0.4], [0.6, 0.9]], 100, total)
        flat = [n for layer in counts for n in layer]
        assert flat == sorted(flat, reverse=True)
        assert len(set(flat)) > 1


# ---- how curves are measured ---------------------------------------------------------------------


def hull(gains):
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
def test_steps_are_those_of_the_concave_hull(gains):
    steps = concave(gains)
    assert list(itertools.accumulate(steps)) == pytest.approx(hull(gains))
    assert all(one >= other - 1e-12 for one, other in itertools.pairwise(steps))


def best_by_trying(gains, total):
    """What all splits of `total` tokens over the heads `(N, n)` gain at most."""
    n = gains.shape[1]
    sums = torch.cat((torch.zeros(len(gains), 1), gains.cumsum(dim=1)), dim=1)
    splits = itertools.product(range(n + 1), repeat=len(gains))
    return max(
        sum(float(sums[head, k]) for head, k in enumerate(split))
        for split in splits
        if sum(split) == total
    )


def test_the_best_budgets_are_found_where_gains_fall():
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


def test_on_other_curves_budgets_follow_the_hull():
    """What a head gains late is worth reaching for, together with what lies before it."""
    gains = torch.tensor([[[0.0, 0.0, 0.0, 9.0], [2.0, 2.0, 2.0, 2.0]]], dtype=torch.float64)
    counts = ((1 - best_rates(gains, 0)) * 4).round().long()[:, 0]
    assert counts[49].tolist() == [4, 0]
    assert counts[24].tolist() == [4, 2]


@given(st.integers(0, 2**16), st.integers(0, 6), st.integers(1, 40))
def test_budgets_spend_what_there_is(seed, n_protected, length):
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


def test_worth_is_later_attention_times_the_norm_of_the_value():
    call, n = drawn_call(26), 20
    found = future_worth(call, n)
    for row, head in KV:
        received = torch.zeros(n, dtype=torch.float64)
        for query_head in (2 * head, 2 * head + 1):
            for token in range(n, 26):
                received += attention_row(call, row, query_head, token)[:n] / 12
        expected = received * call.values[row, head, :n].square().sum(dim=-1).sqrt()
        torch.testing.assert_close(found[row, head], expected, rtol=1e-6, atol=0)


def test_protected_tokens_come_first():
    press = patch_impl.LUKVPress(patch_impl.KnormPress(0.5), sink=2, window=3)
    ranked = press.ranked(drawn_call(9))
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    for head in order.flatten(0, 1):
        assert head[:5].tolist() == [0, 1, 6, 7, 8]
