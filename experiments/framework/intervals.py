"""95% intervals: the bias-corrected and accelerated (BCa) bootstrap over independent units.

A unit is a round of timing, in which every condition is timed, a context, whatever the number of
questions about it, or a part of a text. Both ends of an interval are NaN if there are fewer than
`LEAST` units, or if all units are equal, because resampling them shows no variation.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import DegenerateDataWarning, bootstrap

LEAST = 6
"""Smallest number of units that gives an interval."""

METHOD = "95% bootstrap intervals"
"""Name of the intervals in tables and figures, which then name the units."""

UNITS = "units"
"""Column of tables with the value of each unit, as a text from which anybody can compute intervals;
where a row has several intervals, the end of its name."""

NONE = float("nan"), float("nan")

_RESAMPLES = 5_000


def median_interval(values: Any) -> tuple[float, float]:
    """The interval of a median over units, such as the ratio of times in each round."""
    return _interval(np.median, np.asarray(values, dtype=float))


def mean_interval(values: Any, clusters: Any = None) -> tuple[float, float]:
    """The interval of a mean.

    Args:
        values: `(n,)`, such as scores of questions.
        clusters: the unit that each value belongs to, such as the context of its question; None:
            each value is a unit.
    """
    if clusters is None:
        return _interval(np.mean, np.asarray(values, dtype=float))
    by_unit = pd.Series(np.asarray(values, dtype=float)).groupby(np.asarray(clusters))
    return _interval(_mean_of_all, by_unit.sum().to_numpy(), by_unit.size().to_numpy())


def _mean_of_all(sums: Any, sizes: Any, axis: int = -1) -> Any:
    return sums.sum(axis=axis) / sizes.sum(axis=axis)


def _interval(statistic: Callable[..., Any], *units: Any) -> tuple[float, float]:
    if len(units[0]) < LEAST or all(np.ptp(of_unit) == 0 for of_unit in units):
        return NONE
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)  # then both ends are NaN
        found = bootstrap(
            units, statistic, paired=True, vectorized=True, n_resamples=_RESAMPLES, rng=0
        ).confidence_interval
    return float(found.low), float(found.high)


def mean_of(name: str, values: Any) -> dict[str, Any]:
    """Columns of a table: a mean over units as `name`, its interval, `low` and `high`, `UNITS`."""
    return _row(name, "", values, pd.Series(values).mean(), mean_interval(values))


def median_of(name: str, values: Any, of: str = "") -> dict[str, Any]:
    """The same of a median over rounds; the other names are prefixed with `of`."""
    return _row(name, of, values, np.median(values), median_interval(values))


def _row(name: str, of: str, values: Any, number: Any, ends: tuple[float, float]) -> dict[str, Any]:
    units = " ".join(map("{:.9g}".format, values))
    return {name: float(number), f"{of}low": ends[0], f"{of}high": ends[1], f"{of}{UNITS}": units}


def written(number: float, form: str) -> str:
    """A number as text; what rounds to zero from below has no minus sign."""
    text = f"{number:{form}}"
    return f"{0:{form}}" if text.strip("-0.%") == "" else text


def bracketed(row: Any, name: str, form: str = ".2f", low: str = "low", high: str = "high") -> str:
    """A number of a table with its interval, if it has one: `"0.98 [0.97, 0.99]"`."""
    return written(row[name], form) + bracket(row[low], row[high], form)


def bracket(low: float, high: float, form: str = ".2f") -> str:
    """An interval with a leading space, `" [0.97, 0.99]"`; empty if there is none."""
    return "" if np.isnan(low) else f" [{written(low, form)}, {written(high, form)}]"
