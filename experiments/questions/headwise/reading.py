"""Tables and figures of the head-wise experiment, to be read by people."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.framework.intervals import METHOD, bracket, bracketed
from experiments.framework.ratios import ratio_figure
from experiments.framework.tables import ResultTable
from experiments.questions.headwise.budgets import ALL
from experiments.questions.headwise.trials import MISSING
from experiments.testbed.decoding import FULL


def points(row: Any) -> str:
    """A difference and its interval in percentage points."""
    difference, low, high = (100 * row[name] for name in ("difference", "low", "high"))
    return f"{difference:+.1f}{bracket(low, high, '+.1f')}"


# ---- tables --------------------------------------------------------------------------------------


def _spread(cells: pd.DataFrame, lines: list[str], columns: str, note: str) -> ResultTable:
    """The texts in a column `cell`, a line for each of `lines`."""
    shown = cells.pivot_table("cell", lines, columns, aggfunc="first", sort=False).reset_index()
    return ResultTable(note, list(shown.columns), shown.to_numpy().tolist(), left=len(lines))


def show_difference(difference: pd.DataFrame) -> ResultTable:
    """A line per pair of presses, a column per share evicted."""
    evicted = [f"{ratio:.0%} evicted" for ratio in difference["ratio"].fillna(2)]
    cells = difference.assign(
        cell=[points(row) for row in difference.to_dict("records")],
        evicted=pd.Series(evicted).replace("200% evicted", "mean"),
    )
    note = (
        "Right answers, head-wise minus uniform budgets, in percentage points, with "
        f"{METHOD} over contexts (differences are taken context by context)."
    )
    return _spread(cells, ["pair"], "evicted", note)


def show_decoding(decoding: pd.DataFrame) -> ResultTable:
    """A line per cache, a column per context."""
    pressed = decoding[decoding["condition"] != FULL]
    cells = pressed.assign(
        cell=[bracketed(row, "time") for row in pressed.to_dict("records")],
        tokens=[f"{context:,} tokens" for context in pressed["context"]],
        evicted=pressed["ratio"].map("{:.0%}".format),
        held=pressed["bytes"] / pressed["full_bytes"],
    )
    held = cells.groupby(["condition", "evicted"])["held"].transform("max")
    cells["bytes"] = held.map("{:.3f}".format)
    first = pressed.iloc[0]
    note = (
        f"A decode step of {first['model']}, in times of one on the full cache: median of "
        f"{first['rounds']} rounds in which all took turns, with {METHOD} over rounds; and bytes "
        "of the cache over those of the full one:"
    )
    return _spread(cells, ["condition", "evicted", "bytes"], "tokens", note)


def show_conditions(conditions: pd.DataFrame) -> ResultTable:
    """A line per model, attention implementation and question, a column per way of decoding."""
    offered = conditions[conditions["outcome"] != MISSING].rename(columns={"outcome": "cell"})
    note = (
        "Padded batches, decoded after a short and a long question: are the logits those of a "
        "reference that masks the full cache, within rounding?"
    )
    return _spread(offered, ["model", "implementation", "question"], "condition", note)


VIEWS = {
    "headwise_difference": show_difference,
    "headwise_decoding": show_decoding,
    "headwise_conditions": show_conditions,
}


# ---- figures -------------------------------------------------------------------------------------


def draw_difference(table: pd.DataFrame) -> Figure:
    """Head-wise minus uniform accuracy in points, a panel per share evicted."""
    scaled = table.assign(
        ratio=100 * table["difference"],
        low=100 * table["low"],
        high=100 * table["high"],
        label=table["pair"].replace(ALL, "mean of all"),
        mechanism="hook",
    )
    panels = {
        f"{share:.0%} evicted": scaled[table["ratio"] == share]
        for share in sorted(table["ratio"].dropna().unique())
    }
    figure = ratio_figure(panels, "right answers, head-wise minus uniform (points)", mark=0)
    figure.set_label(
        "Right answers with head-wise budgets minus those with uniform ones, in percentage points, "
        f"by press and share evicted; bars are {METHOD} over contexts"
    )
    return figure
