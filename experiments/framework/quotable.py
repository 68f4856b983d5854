"""The table to quote: press by ratio, with what other experiments have measured of each.

Nothing is run for it. It is read off the tables of a study by their names, whichever there are;
what no table tells is marked as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments.framework.experiment import Tables
from experiments.framework.plots import NO_PRESS, press_label
from experiments.framework.results import Part
from experiments.framework.tables import ResultTable

MISSING = "-"
"""What no table tells."""

ON_FRONTIER = "●"

_PLACE = ["press", "ratio"]
_FORMS = {
    **dict.fromkeys(("facts", "pipeline"), ".0%"),
    **dict.fromkeys(("first token", "tokens/s", "bytes"), ".2f"),
    "logit error": ".3g",
}
"""How numbers are written, by column."""


def joined(tables: Tables) -> pd.DataFrame:
    """Every press at every ratio at which it was asked anything: by ratio, the most right first.

    Returns:
        Indexed by `press`, its class name, and `ratio`, NaN where nothing was measured: `facts`,
        the share of right answers, mean over the questions that the press saw and those it did
        not; `pipeline`, the same over the tasks that were asked through the pipeline; `first
        token`, `tokens/s` and `bytes` over those without a press; and `logit error`, the largest
        against the full cache.
    """
    quality = _pressed(tables, "quality", "question", "accuracy")
    answers = quality.groupby(_PLACE)["accuracy"].agg(["mean", "size"])
    asked = _pressed(tables, "evaluate", "score")
    # A sweep writes presses as text: AdaKVPress(SnapKVPress()).
    asked["press"] = asked["press"].astype(str).str.replace(r"\(.*", "", regex=True)
    timed = _of(tables, "throughput_first", "model", "first", "speed", "bytes")
    timed = timed[timed["model"].isin(timed["model"].head(1))]  # the one that was timed first
    whole = timed.loc[timed["press"] == NO_PRESS, "bytes"].max()
    timed = timed.set_index(_PLACE)
    logits = _of(tables, "error_logits", "logit_error").set_index(_PLACE)
    columns = {
        "facts": answers["mean"].where(answers["size"] == quality["question"].nunique()),
        "pipeline": asked.groupby(_PLACE)["score"].mean(),
        "first token": timed["first"],
        "tokens/s": timed["speed"],
        "bytes": timed["bytes"] / whole,
        "logit error": logits["logit_error"],
        "asked": answers["mean"],  # also presses that have to see the question
    }
    found = pd.DataFrame(columns).astype(float)
    found["right"] = found["facts"].fillna(found["pipeline"]).fillna(0)
    ordered = found[found[["asked", "pipeline"]].notna().any(axis=1)].sort_values(
        by=["ratio", "right", "press"], ascending=[True, False, True]
    )
    return ordered[[*_FORMS]]


def _of(tables: Tables, name: str, *columns: str) -> pd.DataFrame:
    """Columns of a table, with a row for each press and ratio; no rows if there is no such."""
    return tables.get(name, pd.DataFrame()).reindex(columns=[*_PLACE, *columns])


def _pressed(tables: Tables, name: str, *columns: str) -> pd.DataFrame:
    """The same of one mechanism, with a press."""
    table = _of(tables, name, "mechanism", *columns)
    first = "hook" if (table["mechanism"] == "hook").any() else "patch"
    return table[(table["press"] != NO_PRESS) & (table["mechanism"] == first)].copy()


def frontier(rows: pd.DataFrame) -> pd.Series:
    """Whether no other row answers as many facts from as few bytes, and is better in one.

    Both in whole per cent: blocks of heads of different lengths leave a little room.
    """
    measured = rows[["facts", "bytes"]].round(2)

    def best(row: pd.Series) -> bool:
        others = measured[(measured["facts"] >= row["facts"]) & (measured["bytes"] <= row["bytes"])]
        return len(others) > 0 and bool((others == row).all(axis=None))

    return measured.apply(best, axis=1)


def quotable(parts: Sequence[Part]) -> ResultTable | None:
    """The table for people; None if a study tells the accuracy of no press."""
    tables = {name: t for part in parts if not part.error for name, t in part.tables.items()}
    rows = joined(tables)
    if rows.empty:
        return None
    places = zip(rows.index, rows.to_dict("records"), frontier(rows), strict=True)
    shown = [
        [ON_FRONTIER * best, press_label(press), f"{ratio:.0%}", *map(_written, row, row.values())]
        for (press, ratio), row, best in places
    ]
    timed = _of(tables, "throughput_first", "model", "context").to_dict("records")
    times = (
        "Time to the first token, tokens per second and bytes of the cache over those without a "
        f"press ({timed[0]['model']}, {timed[0]['context']:,} tokens). "
        if timed
        else ""
    )
    note = (
        "Every press at every ratio, the most right answers first. Right answers to facts (mean of "
        "questions that the press saw and of those it did not) and through the pipeline (mean of "
        f"its tasks). {times}Largest error of a logit against the full cache. "
        f"{ON_FRONTIER} on the frontier: no other answers more facts from as few bytes. "
        f"{MISSING} not measured."
    )
    return ResultTable(note, ["", "press", "evicted", *rows.columns], shown, left=2)


def _written(column: Any, number: float) -> str:
    return MISSING if pd.isna(number) else f"{number:{_FORMS[column]}}"
