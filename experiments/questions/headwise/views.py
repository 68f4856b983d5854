"""Tables of the head-wise experiment, to be read by people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

import pandas as pd

from experiments.framework.experiment import Tables
from experiments.framework.intervals import METHOD, bracket, bracketed
from experiments.framework.plots import NO_PRESS
from experiments.framework.tables import ResultTable
from experiments.questions.headwise.budgets import ALL
from experiments.questions.headwise.trials import MISSING
from experiments.testbed.decoding import FULL
from experiments.testbed.variants import VARIANTS

UNDECIDED = "made no difference that could be shown"


def views(tables: Tables) -> list[ResultTable]:
    """What there is to read of the tables."""
    return [show(tables[name]) for name, show in _VIEWS if name in tables]


def verdict(row: Any) -> str:
    """Whether head-wise budgets helped, by the interval of a difference."""
    if row["low"] > 0:
        return "helped"
    return "cost answers" if row["high"] < 0 else UNDECIDED


def points(row: Any) -> str:
    """A difference and its interval in percentage points."""
    difference, low, high = (100 * row[name] for name in ("difference", "low", "high"))
    return f"{difference:+.1f}{bracket(low, high, '+.1f')}"


def by_press(difference: pd.DataFrame) -> str:
    """With which presses head-wise budgets helped, and in how many single comparisons."""
    of_pairs = difference[difference["ratio"].isna() & (difference["pair"] != ALL)]
    told: dict[str, list[str]] = {"helped": [], "cost answers": [], UNDECIDED: []}
    for _, row in of_pairs.iterrows():
        told[verdict(row)].append(f"{row['pair']} {points(row)}")
    listed = "; ".join(f"{said} with {', '.join(names)}" for said, names in told.items() if names)
    single = difference[(difference["pair"] != ALL) & difference["ratio"].notna()]
    better, worse = int((single["low"] > 0).sum()), int((single["high"] < 0).sum())
    return (
        f"They {listed}. Of {len(single)} single comparisons {better} are better and {worse} "
        "worse, with intervals that leave out 0."
    )


def _show_difference(difference: pd.DataFrame) -> ResultTable:
    ratios = sorted(difference["ratio"].dropna().unique())
    rows = []
    for pair, of_pair in difference.groupby("pair", sort=False):
        by, mean = rows_by(of_pair, "ratio"), of_pair[of_pair["ratio"].isna()].iloc[0]
        name = "mean of all" if pair == ALL else str(pair)
        rows.append([name, *(points(by[ratio]) for ratio in ratios), points(mean)])
    note = (
        "Right answers, head-wise minus uniform budgets, in percentage points, with "
        f"{METHOD} over contexts (differences are taken context by context). "
        f"{by_press(difference)}"
    )
    return ResultTable(note, ["head-wise press", *_evicted(ratios), "mean"], rows)


def _show_accuracy(accuracy: pd.DataFrame) -> ResultTable:
    first, bare = accuracy.iloc[0], accuracy[accuracy["press"] == NO_PRESS].iloc[0]
    pressed = accuracy[accuracy["press"] != NO_PRESS]
    ratios = sorted(pressed["ratio"].unique())
    rows = []
    for _, of_press in pressed.groupby(["pair", "budgets"], sort=False):
        by, press = rows_by(of_press, "ratio"), of_press.iloc[0]
        cells = [f"{by[ratio]['accuracy']:.1%}, {by[ratio]['bytes']:.3f}" for ratio in ratios]
        rows.append([press["press"], press["budgets"], *cells])
    widest = (accuracy["high"] - accuracy["low"]).max()
    within = "" if isnan(widest) else f" ({METHOD} over contexts are at most {widest:.1%} wide)"
    most = (pressed["bytes"] / (1 - pressed["ratio"])).max()
    note = (
        f"Right answers{within}, and bytes of the cache over those of the full one: "
        f"{first['contexts']} contexts of {first['context']} words, {first['answers']} "
        f"questions unseen by the press; with nothing evicted {bare['accuracy']:.1%} are right. No "
        f"cache holds more than {most:.3f} times the share that it was told to keep."
    )
    return ResultTable(note, ["press", "budgets", *_evicted(ratios)], rows, left=2)


def _show_decoding(decoding: pd.DataFrame) -> ResultTable:
    pressed = decoding[decoding["condition"] != FULL]
    contexts = sorted(pressed["context"].unique())
    rows = []
    for (ratio, name), of_condition in pressed.groupby(["ratio", "condition"], sort=False):
        by = rows_by(of_condition, "context")
        held = (of_condition["bytes"] / of_condition["full_bytes"]).max()
        rows.append([f"{name}, {ratio:.0%} evicted", f"{held:.3f}"])
        rows[-1] += [bracketed(by[context], "time") for context in contexts]
    first = pressed.iloc[0]
    note = (
        f"A decode step of {first['model']}, in times of one on the full cache: median of "
        f"{first['rounds']} rounds in which all took turns, with {METHOD} over rounds; and bytes "
        "of the cache over those of the full one:"
    )
    head = ["cache", "bytes", *(f"{context:,} tokens" for context in contexts)]
    return ResultTable(note, head, rows)


def _show_conditions(conditions: pd.DataFrame) -> ResultTable:
    offered = conditions[conditions["outcome"] != MISSING]
    rows = []
    for (model, implementation), tried in offered.groupby(["model", "implementation"], sort=False):
        outcomes = [_outcome(tried[tried["condition"] == name]) for name in VARIANTS]
        rows.append([f"{model}, {implementation}", *outcomes])
    of = {name: conditions[conditions["condition"] == name] for name in VARIANTS}
    rows.append(["touches", *(_touched(of[name]) for name in VARIANTS)])
    frees = ["yes" if variant.frees else "no" for variant in VARIANTS.values()]
    rows.append(["frees memory", *frees])
    short, long = sorted(offered["question"].unique())
    note = (
        f"Padded batches, decoded after questions of {short} and of {long} tokens: are the logits "
        "those of a reference that masks the full cache, within rounding?"
    )
    return ResultTable(note, ["", *VARIANTS], rows, left=1 + len(VARIANTS))


def _touched(rows: pd.DataFrame) -> str:
    """What a condition changes while its scope is open, over all its trials."""
    kinds = {
        "hooks": rows["hooks"].max() > 0,
        "forwards": rows["forwards"].max() > 0,
        "attention registry": rows["registry"].any(),
    }
    return ", ".join(kind for kind, is_touched in kinds.items() if is_touched)


def _outcome(rows: pd.DataFrame) -> str:
    """What came of one condition with one implementation, over the questions asked."""
    outcomes = dict(zip(rows["question"], rows["outcome"], strict=True))
    if len(set(outcomes.values())) == 1:
        return str(rows["outcome"].iloc[0])
    return ", ".join(f"{n} tokens: {outcome}" for n, outcome in outcomes.items())


def rows_by(table: pd.DataFrame, column: str) -> dict[Any, Any]:
    """Rows by what stands in a column, where it differs in all of them."""
    records: list[dict[Any, Any]] = table.to_dict("records")
    return {row[column]: row for row in records}


def _evicted(ratios: Sequence[float]) -> list[str]:
    return [f"{ratio:.0%} evicted" for ratio in ratios]


_VIEWS: tuple[tuple[str, Callable[[pd.DataFrame], ResultTable]], ...] = (
    ("headwise_difference", _show_difference),
    ("headwise_accuracy", _show_accuracy),
    ("headwise_decoding", _show_decoding),
    ("headwise_conditions", _show_conditions),
)
