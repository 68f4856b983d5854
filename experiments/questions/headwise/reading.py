"""Tables and figures of the head-wise experiment, to be read by people."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.framework.intervals import METHOD, bracket, bracketed
from experiments.framework.ratios import ratio_figure
from experiments.framework.tables import ResultTable
from experiments.questions.headwise.budgets import ALL
from experiments.questions.headwise.shapes import RATIO
from experiments.questions.headwise.trials import MISSING
from experiments.testbed.decoding import FULL
from experiments.testbed.variants import VARIANTS


def points(row: Any) -> str:
    """A difference and its interval in percentage points."""
    difference, low, high = (100 * row[name] for name in ("difference", "low", "high"))
    return f"{difference:+.1f}{bracket(low, high, '+.1f')}"


# ---- tables --------------------------------------------------------------------------------------


def show_difference(difference: pd.DataFrame) -> ResultTable:
    """A line per pair of presses, a column per share evicted."""
    cells = difference.assign(
        cell=[points(row) for row in difference.to_dict("records")],
        evicted=[f"{ratio:.0%} evicted" for ratio in difference["ratio"].fillna(2)],
    )
    shown = cells.pivot_table("cell", "pair", "evicted", aggfunc="first", sort=False)
    head = ["head-wise press", *shown.rename(columns={"200% evicted": "mean"})]
    note = (
        "Right answers, head-wise minus uniform budgets, in percentage points, with "
        f"{METHOD} over contexts (differences are taken context by context)."
    )
    return ResultTable(note, head, shown.reset_index().to_numpy().tolist())


def show_decoding(decoding: pd.DataFrame) -> ResultTable:
    """A line per cache, a column per context."""
    pressed = decoding[decoding["condition"] != FULL]
    cells = pressed.assign(
        cell=[bracketed(row, "time") for row in pressed.to_dict("records")],
        tokens=[f"{context:,} tokens" for context in pressed["context"]],
        cache=pressed["condition"] + [f", {ratio:.0%} evicted" for ratio in pressed["ratio"]],
        held=pressed["bytes"] / pressed["full_bytes"],
    )
    shown = cells.pivot_table("cell", "cache", "tokens", aggfunc="first", sort=False)
    held = cells.groupby("cache", sort=False)["held"].max().map("{:.3f}".format)
    shown.insert(0, "bytes", held)
    first = pressed.iloc[0]
    note = (
        f"A decode step of {first['model']}, in times of one on the full cache: median of "
        f"{first['rounds']} rounds in which all took turns, with {METHOD} over rounds; and bytes "
        "of the cache over those of the full one:"
    )
    return ResultTable(note, ["cache", *shown.columns], shown.reset_index().to_numpy().tolist())


def show_conditions(conditions: pd.DataFrame) -> ResultTable:
    """A line per model and attention implementation, a column per way of decoding."""
    offered = conditions[conditions["outcome"] != MISSING]
    cells = offered.assign(
        asked=offered["model"] + ", " + offered["implementation"],
        question=[f"{n} tokens" for n in offered["question"]],
    )
    shown = cells.pivot_table(
        "outcome", ["asked", "question"], "condition", aggfunc="first", sort=False
    )
    rows = shown[list(VARIANTS)].reset_index().to_numpy().tolist()
    kinds = ["hooks", "forwards", "registry"]
    most = conditions.groupby("condition")[kinds].max().to_dict("index")
    touched = [", ".join(kind for kind in kinds if most[name][kind]) for name in VARIANTS]
    rows.append(["touches", "", *touched])
    frees = ["yes" if variant.frees else "no" for variant in VARIANTS.values()]
    rows.append(["frees memory", "", *frees])
    note = (
        "Padded batches, decoded after a short and a long question: are the logits those of a "
        "reference that masks the full cache, within rounding?"
    )
    return ResultTable(note, ["", "question", *VARIANTS], rows, left=None)


def show_shapes(shapes: pd.DataFrame) -> ResultTable:
    """A line per shape."""
    cells = shapes.assign(cell=[bracketed(row, "time") for row in shapes.to_dict("records")])
    keys = ["batch", "heads", "context"]
    shown = cells.pivot_table("cell", keys, "against", aggfunc="first", sort=False)
    head = [*keys, *(f"step / {against}" for against in shown)]
    note = (
        "A decode step over ragged heads, in times of one over as many bytes in heads of one "
        f"length (uniform) and over everything (full), {RATIO:.0%} evicted, by KV heads x queries "
        f"of each x channels: medians, with {METHOD} over rounds:"
    )
    return ResultTable(note, head, shown.reset_index().to_numpy().tolist(), left=0)


VIEWS = {
    "headwise_difference": show_difference,
    "headwise_decoding": show_decoding,
    "headwise_conditions": show_conditions,
    "headwise_shapes": show_shapes,
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


FIGURES = {"headwise_difference": draw_difference}
