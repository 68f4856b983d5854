"""The table to quote: press by ratio, with what other experiments have measured of each.

Nothing is run for it. It is read off the tables of a study by their names, whichever there are;
what no table tells is marked as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from experiments.framework.experiment import Tables
from experiments.framework.plots import NO_PRESS, press_label
from experiments.framework.results import Part
from experiments.framework.tables import ResultTable

MISSING = "-"
"""What no table tells."""

ON_FRONTIER = "●"

Place = tuple[str, float]
"""A press, by its class name, and the share of the tokens that it is told to evict."""

Values = dict[Place, float]


class Line(NamedTuple):
    """One row; None where nothing was measured.

    Attributes:
        facts: share of right answers, mean over the questions that the press saw and those it did
            not.
        pipeline: the same, mean over the tasks that were asked through the pipeline.
        first: time to the first token over that without a press.
        speed: tokens per second over those without a press.
        n_bytes: of the cache, over those without a press.
        logit_error: largest of a logit, against the full cache.
        equal: whether both mechanisms left the same bits, in all that compared them.
    """

    press: str
    ratio: float
    facts: float | None
    pipeline: float | None
    first: float | None
    speed: float | None
    n_bytes: float | None
    logit_error: float | None
    equal: bool | None


def lines(tables: Tables) -> list[Line]:
    """Every press at every ratio at which it was asked anything: by ratio, the most right first."""
    asked, facts, pipeline = _asked(tables), _facts(tables), _pipeline(tables)
    timed, logit_error, equal = _timed(tables), _logit_error(tables), _equal(tables)
    first, speed, n_bytes = (timed[name] for name in _TIMES)
    found = [
        Line(
            *place,
            facts=facts.get(place),
            pipeline=pipeline.get(place),
            first=first.get(place),
            speed=speed.get(place),
            n_bytes=n_bytes.get(place),
            logit_error=logit_error.get(place),
            equal=equal(place),
        )
        for place in {**asked, **pipeline}
    ]

    def order(line: Line) -> tuple[float, float, str]:
        shares = [share for share in (line.facts, line.pipeline) if share is not None]
        return line.ratio, -max(shares[:1], default=0.0), line.press

    return sorted(found, key=order)


def frontier(rows: Sequence[Line]) -> set[Place]:
    """Rows beside which no other answers as many facts from as few bytes, and is better in one.

    Both in whole per cent: blocks of heads of different lengths leave a little room.
    """
    measured = [
        (line.press, line.ratio, round(line.facts, 2), round(line.n_bytes, 2))
        for line in rows
        if line.facts is not None and line.n_bytes is not None
    ]
    return {
        (press, ratio)
        for press, ratio, right, held in measured
        if not any(
            other >= right and less <= held and (other, less) != (right, held)
            for *_, other, less in measured
        )
    }


def quotable(parts: Sequence[Part]) -> ResultTable | None:
    """The table for people; None if a study tells the accuracy of no press."""
    tables = {name: t for part in parts if not part.error for name, t in part.tables.items()}
    rows = lines(tables)
    if not rows:
        return None
    best = frontier(rows)
    shown = [_cells(line, (line.press, line.ratio) in best) for line in rows]
    note = (
        "Every press at every ratio, the most right answers first. Right answers to facts (mean of "
        "questions that the press saw and of those it did not) and through the pipeline (mean of "
        f"its tasks). {_on_times(tables)}Largest error of a logit against the full cache. Whether "
        "hooks and patches left the same bits in all that compared them. "
        f"{ON_FRONTIER} on the frontier: no other answers more facts from as few bytes. "
        f"{MISSING} not measured."
    )
    head = ["", "press", "evicted", "facts", "pipeline", "first token", "tokens/s", "bytes"]
    return ResultTable(note, [*head, "logit error", "same bits"], shown, left=2)


def _on_times(tables: Tables) -> str:
    table = tables.get("throughput_first")
    if table is None:
        return ""
    first = table.iloc[0]
    return (
        "Time to the first token, tokens per second and bytes of the cache over those without a "
        f"press ({first['model']}, {first['context']:,} tokens). "
    )


def _cells(line: Line, is_best: bool) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return MISSING if value is None else format(value, form)

    same = MISSING if line.equal is None else "yes" if line.equal else "no"
    return [
        ON_FRONTIER if is_best else "",
        press_label(line.press),
        f"{line.ratio:.0%}",
        shown(line.facts, ".0%"),
        shown(line.pipeline, ".0%"),
        *(shown(value, ".2f") for value in (line.first, line.speed, line.n_bytes)),
        shown(line.logit_error, ".3g"),
        same,
    ]


# ---- from the tables of experiments --------------------------------------------------------------


def _asked(tables: Tables) -> Values:
    """Of all presses, also those that have to see the question."""
    table = _pressed(tables, "quality")
    return {} if table is None else _values(table.groupby(["press", "ratio"])["accuracy"].mean())


def _facts(tables: Tables) -> Values:
    """Of presses that were asked in both ways."""
    table = _pressed(tables, "quality")
    if table is None:
        return {}
    by_question = table.groupby(["press", "ratio"])["accuracy"].agg(["mean", "size"])
    asked_in_all = by_question[by_question["size"] == table["question"].nunique()]
    return _values(asked_in_all["mean"])


def _pipeline(tables: Tables) -> Values:
    table = _pressed(tables, "evaluate")
    if table is None:
        return {}
    # A sweep writes presses as text: AdaKVPress(SnapKVPress()).
    names = table["press"].str.replace(r"\(.*", "", regex=True)
    return _values(table.assign(press=names).groupby(["press", "ratio"])["score"].mean())


_TIMES = ("first", "speed", "bytes")


def _timed(tables: Tables) -> dict[str, Values]:
    """What the model that was timed at most ratios says."""
    table = tables.get("throughput_first")
    if table is None:
        return {name: {} for name in _TIMES}
    own = table[table["model"] == table["model"].iloc[0]]
    whole = own.loc[own["press"] == NO_PRESS, "bytes"].iloc[0]
    pressed = own[own["press"] != NO_PRESS].set_index(["press", "ratio"])
    held = pressed["bytes"] / whole
    return {
        "first": _values(pressed["first"]),
        "speed": _values(pressed["speed"]),
        "bytes": _values(held),
    }


def _logit_error(tables: Tables) -> Values:
    table = tables.get("error_logits")
    return {} if table is None else _values(table.set_index(["press", "ratio"])["logit_error"])


def _equal(tables: Tables) -> Callable[[Place], bool | None]:
    """What is known of a press at a ratio, or at whatever ratio its bits were compared."""
    at_ratio: dict[Place, list[bool]] = {}
    of_press: dict[str, list[bool]] = {}
    if (logits := tables.get("error_logits")) is not None:
        for place, equal in _values(logits.set_index(["press", "ratio"])["equal"]).items():
            at_ratio.setdefault(place, []).append(bool(equal))
    if (agreed := tables.get("quality_agreement")) is not None:
        same = agreed.assign(same=agreed["same"] == agreed["answers"])
        for place, equal in _values(same.groupby(["press", "ratio"])["same"].min()).items():
            at_ratio.setdefault(place, []).append(bool(equal))
    if (compared := tables.get("equivalence")) is not None:
        told = compared[compared["compared"] > 0]
        for press, differ in told.groupby("press")["differ"].sum().items():
            of_press[str(press)] = [not differ]

    def known(place: Place) -> bool | None:
        outcomes = at_ratio.get(place, []) + of_press.get(place[0], [])
        return all(outcomes) if outcomes else None

    return known


def _pressed(tables: Tables, name: str) -> pd.DataFrame | None:
    """Rows of one mechanism with a press; None if there are none."""
    table = tables.get(name)
    if table is None:
        return None
    first = "hook" if (table["mechanism"] == "hook").any() else "patch"
    rows = table[(table["press"] != NO_PRESS) & (table["mechanism"] == first)]
    return None if rows.empty else rows


def _values(series: Any) -> Values:
    """A series by press and ratio as a dictionary."""
    return {(str(press), float(ratio)): float(value) for (press, ratio), value in series.items()}
