"""Intervals hold what they should as often as they say, and are not made of too little."""

from pathlib import Path

import numpy as np
import pytest

from experiments.framework.intervals import LEAST, bracketed, mean_interval, median_interval
from experiments.framework.results import read_table

NONE = pytest.approx((float("nan"), float("nan")), nan_ok=True)


def test_a_mean_is_in_its_interval_about_95_times_in_100():
    rng = np.random.default_rng(0)
    intervals = [mean_interval(rng.exponential(size=30)) for _ in range(300)]
    held = np.mean([low <= 1 <= high for low, high in intervals])
    assert 0.90 <= held <= 0.98


def test_questions_about_one_context_count_as_one():
    """Sixteen contexts, all of whose eight questions are answered alike, are no 128 trials."""
    of_contexts = np.random.default_rng(0).integers(0, 2, 16)
    scores, contexts = np.repeat(of_contexts, 8), np.repeat(np.arange(16), 8)
    clustered = mean_interval(scores, contexts)
    assert clustered == pytest.approx(mean_interval(of_contexts))
    low, high = mean_interval(scores)
    assert clustered[1] - clustered[0] > 2 * (high - low)


def test_a_context_weighs_as_much_as_it_has_questions():
    scores = [0.0] * 6 + [1.0] * 60
    contexts = [*range(6), *np.repeat(np.arange(6, 12), 10)]
    low, high = mean_interval(scores, contexts)
    assert low < np.mean(scores) < high
    assert low > np.mean([0, 1])


def test_what_a_round_shares_cancels_in_a_ratio():
    rng = np.random.default_rng(0)
    moments, noise = rng.lognormal(sigma=1, size=20), rng.normal(1, 0.01, size=20)
    low, high = median_interval(moments * 1.1 * noise / moments)
    assert low < 1.1 < high
    assert high - low < 0.03


@pytest.mark.parametrize("name", ["quality", "overhead", "headwise_decoding"])
def test_committed_intervals_follow_from_their_units(name):
    interval = mean_interval if name == "quality" else median_interval
    table = read_table(Path(__file__).parents[2] / "results" / f"{name}.csv")
    for row in table[::20].to_dict("records"):
        found = interval([float(unit) for unit in row["units"].split()])
        assert found == pytest.approx((row["low"], row["high"]), abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("interval", [mean_interval, median_interval])
def test_too_little_gives_no_interval(interval):
    assert interval([]) == NONE
    assert interval(range(LEAST - 1)) == NONE
    low, high = interval(range(LEAST))
    assert 0 <= low < high <= LEAST - 1


def test_what_is_all_alike_gives_no_interval():
    assert mean_interval([1.0] * 50) == NONE
    assert mean_interval([1.0] * 50, [min(i, 20) for i in range(50)]) == NONE
    assert mean_interval([0.5] * 20, [0] * 20) == NONE


def test_a_number_without_an_interval_stands_alone():
    row = {"time": 0.976, "low": 0.961, "high": 0.989}
    assert bracketed(row, "time") == "0.98 [0.96, 0.99]"
    assert bracketed(row | {"low": float("nan")}, "time") == "0.98"
    assert bracketed({"of": -0.04, "low": -0.3, "high": 0}, "of", "+.1f") == "+0.0 [-0.3, +0.0]"
