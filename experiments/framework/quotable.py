"""The summary table of a study: a row per press and ratio, with numbers of several experiments.

Nothing runs for it: the numbers are taken from the study's tables, and those of absent tables are
marked as missing.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments.framework.experiment import Tables
from experiments.framework.plots import NO_PRESS, press_label
from experiments.framework.results import Part
from experiments.framework.tables import ResultTable
from experiments.testbed.facts import SEEN, UNSEEN

MISSING = "-"
"""A cell without a number."""

ON_FRONTIER = "●"

_KEYS = ["press", "ratio"]
_FORMS = {
    **dict.fromkeys(("unseen", "seen", "pipeline"), ".0%"),
    **dict.fromkeys(("first token", "tokens/s", "bytes"), ".2f"),
    "logit error": ".3g",
}
"""Formats of numbers, by column."""


def joined(tables: Tables) -> pd.DataFrame:
    """Every press at every ratio for which accuracy was measured, by ratio, then by accuracy.

    Returns:
        Indexed by `press`, its class name, and `ratio`; NaN where nothing was measured. Columns:
        `unseen` and `seen`, the shares of right answers to questions that the press did not see
        and to those it saw; `pipeline`, the share of right answers through the pipeline, mean
        over its tasks; `first token`, `tokens/s` and `bytes`, as ratios to those without a press;
        and `logit error`, the largest against the full cache.
    """
    quality = _pressed(tables, "quality", "question", "accuracy")
    answers = {
        kind: rows.set_index(_KEYS)["accuracy"] for kind, rows in quality.groupby("question")
    }
    scored = _pressed(tables, "evaluate", "score")
    # A sweep writes presses as text: AdaKVPress(SnapKVPress()).
    scored["press"] = scored["press"].astype(str).str.replace(r"\(.*", "", regex=True)
    timed = _columns(tables, "throughput_first", "model", "first", "speed", "bytes")
    timed = timed[timed["model"].isin(timed["model"].head(1))]  # only the first model in the table
    whole = timed.loc[timed["press"] == NO_PRESS, "bytes"].max()
    timed = timed.set_index(_KEYS)
    logits = _columns(tables, "error_logits", "logit_error").set_index(_KEYS)
    columns = {
        "unseen": answers.get(UNSEEN),
        "seen": answers.get(SEEN),
        "pipeline": scored.groupby(_KEYS)["score"].mean(),
        "first token": timed["first"],
        "tokens/s": timed["speed"],
        "bytes": timed["bytes"] / whole,
        "logit error": logits["logit_error"],
    }
    found = pd.DataFrame(columns).astype(float)
    found["right"] = found["unseen"].fillna(found["pipeline"]).fillna(0)
    ordered = found[found[["unseen", "seen", "pipeline"]].notna().any(axis=1)].sort_values(
        by=["ratio", "right", "press"], ascending=[True, False, True]
    )
    return ordered[[*_FORMS]]


def _columns(tables: Tables, name: str, *columns: str) -> pd.DataFrame:
    """Press, ratio and `columns` of a table; no rows if the study has no such table."""
    return tables.get(name, pd.DataFrame()).reindex(columns=[*_KEYS, *columns])


def _pressed(tables: Tables, name: str, *columns: str) -> pd.DataFrame:
    """The same for the rows with a press, of one mechanism: hook if there is one, else patch."""
    table = _columns(tables, name, "mechanism", *columns)
    first = "hook" if (table["mechanism"] == "hook").any() else "patch"
    return table[(table["press"] != NO_PRESS) & (table["mechanism"] == first)].copy()


def frontier(rows: pd.DataFrame) -> pd.Series:
    """Whether a row is on the Pareto frontier of right answers to unseen questions and of bytes,
    among the rows that have both.

    Both are rounded to whole per cent, because blocks for heads of different lengths leave a few
    slots empty.
    """
    measured = rows[["unseen", "bytes"]].round(2)

    def best(row: pd.Series) -> bool:
        as_right = measured["unseen"] >= row["unseen"]
        others = measured[as_right & (measured["bytes"] <= row["bytes"])]
        return len(others) > 0 and bool((others == row).all(axis=None))

    return measured.apply(best, axis=1)


def quotable(parts: Sequence[Part]) -> ResultTable | None:
    """The table for readers; None if the study measured the accuracy of no press."""
    tables = {name: t for part in parts if not part.error for name, t in part.tables.items()}
    rows = joined(tables)
    if rows.empty:
        return None
    numbered = zip(rows.index, rows.to_dict("records"), frontier(rows), strict=True)
    shown = [
        [press_label(press), ON_FRONTIER * best, f"{ratio:.0%}", *map(_written, row, row.values())]
        for (press, ratio), row, best in numbered
    ]
    timed = _columns(tables, "throughput_first", "model", "context", "batch").to_dict("records")
    times = (
        "Time to first token, tokens per second and cache bytes are ratios to those without a press"
        f" ({timed[0]['model']}, {timed[0]['context']:,} tokens, batch {timed[0]['batch']}). "
        if timed
        else ""
    )
    note = (
        "Presses with measured accuracy, by share evicted and accuracy. `unseen` and `seen` are "
        "shares of right answers to questions that the press did not see, and saw; `pipeline` that "
        f"through the pipeline (mean of its tasks; presses with their default windows). {times}"
        "The logit error is the largest against the full cache. "
        f"{ON_FRONTIER} is on the Pareto frontier of the rows with bytes measured: none of these "
        f"answers more unseen questions, to 1%, from as few bytes. {MISSING} means not measured."
    )
    return ResultTable(note, ["press", "", "evicted", *rows.columns], shown, left=2)


def _written(column: Any, number: float) -> str:
    return MISSING if pd.isna(number) else f"{number:{_FORMS[column]}}"
