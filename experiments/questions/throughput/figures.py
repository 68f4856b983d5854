"""Figures of `experiments.questions.throughput`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from experiments.framework.experiment import Tables
from experiments.framework.intervals import METHOD
from experiments.framework.options import size_of
from experiments.framework.plots import (
    INK,
    MUTED,
    NO_PRESS,
    label_lines,
    mechanism_colour,
    mechanism_marker,
    new_figure,
    press_label,
    style,
)
from experiments.questions.throughput.findings import SLOW
from experiments.questions.throughput.views import fits_of

MOST_PRESSES = 4
"""Presses that the first figure has a row of panels for."""


def figures(tables: Tables) -> dict[str, Figure]:
    """By the name of their table."""
    drawing: dict[str, Callable[[pd.DataFrame], Figure]] = {
        "throughput": speed,
        "throughput_first": first_token,
        "throughput_fits": fits,
    }
    return {name: draw(tables[name]) for name, draw in drawing.items() if name in tables}


# ---- tokens per second ---------------------------------------------------------------------------


def speed(table: pd.DataFrame) -> Figure:
    """Tokens per second against context, a row of panels per press, a column per batch.

    Those with a press are the ratio that was measured in pairs, of those without one.
    """
    keys = ["model", "context", "batch"]
    bare = table[table["press"] == NO_PRESS].set_index(keys)["tokens_per_s"]
    whole = bare.reindex(pd.MultiIndex.from_frame(table[keys])).to_numpy()
    shown = table.assign(rate=table["speed"] * whole)
    presses = list(shown.loc[shown["press"] != NO_PRESS, "press"].unique())[:MOST_PRESSES]
    batches = sorted(shown["batch"].unique())
    rows, columns = max(len(presses), 1), len(batches)
    figure, axes = new_figure(
        rows, columns, width=1.2 + 3.3 * columns, height=0.5 + 2.4 * rows, sharex=True
    )
    with style():
        for index, panel in enumerate(axes):
            batch, press = batches[index % columns], [*presses, NO_PRESS][index // columns]
            own = shown[(shown["batch"] == batch) & shown["press"].isin([press, NO_PRESS])]
            _draw_speeds(panel, own)
            panel.set_title(f"{press_label(press)}, batch {batch}")
        for panel in axes[-columns:]:
            panel.set_xlabel("tokens of context")
        for panel in axes[::columns]:
            panel.set_ylabel("tokens / s")
    figure.set_label(
        f"Tokens per second of {shown['model'].iloc[0]} against context, by press, share evicted "
        "and mechanism: the paired ratio times the rate without a press"
    )
    return figure


_LINES = {"patch": "--", "kvpress": ":"}


def _draw_speeds(panel: Axes, table: pd.DataFrame) -> None:
    keys = ["press", "ratio", "mechanism"]
    for (press, ratio, mechanism), rows in table.groupby(keys, sort=False):
        colour, marker = mechanism_colour(str(mechanism)), mechanism_marker(str(mechanism))
        ordered = rows.sort_values("context")
        look: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "linestyle": _LINES.get(str(mechanism), "-"),
            "label": NO_PRESS if press == NO_PRESS else f"{mechanism}, {ratio:.0%} evicted",
        }
        panel.plot(ordered["context"], ordered["rate"], **look)
    contexts = sorted(table["context"].unique())
    panel.set_xscale("log", base=2)
    panel.set_xticks(contexts, [f"{context:,}" for context in contexts])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_ylim(0, 1.12 * table["rate"].max())
    label_lines(panel, gap=0.06)


# ---- first token ---------------------------------------------------------------------------------


def first_token(table: pd.DataFrame) -> Figure:
    """Time to the first token over that without a press, a dot per press, a panel per model."""
    pressed = table[table["press"] != NO_PRESS]
    models = list(dict.fromkeys(pressed["model"]))
    last = pressed[pressed["model"] == models[-1]].groupby("press")["first"].mean()
    others = [press for press in pressed["press"].unique() if press not in last.index]
    names = [*last.sort_values().index, *others]
    size = {"width": 2.0 + 2.6 * len(models), "height": 1.1 + 0.17 * len(names)}
    figure, axes = new_figure(1, len(models), **size, sharey=True)
    with style():
        for panel, model in zip(axes, models, strict=True):
            rows = pressed[pressed["model"] == model]
            panel.axvline(1, color=MUTED, linewidth=1)
            panel.axvline(SLOW, color=MUTED, linewidth=1, linestyle=":")
            ratio = rows["ratio"].min()
            ends = {"first_low": rows["first"], "first_high": rows["first"]}  # without an interval
            rows = rows.fillna(ends)
            for row in rows[rows["ratio"] == ratio].to_dict("records"):
                y, colour = names.index(row["press"]), mechanism_colour(row["mechanism"])
                panel.plot(
                    [row["first_low"], row["first_high"]], [y, y], color=colour, linewidth=1.4
                )
                panel.plot(row["first"], y, "o", color=colour)
                _beside(panel, row["first_high"], y, f"{row['first']:.2f}")
            panel.set_title(model)
            panel.set_xlabel(f"first token / no press ({ratio:.0%} evicted)")
            panel.set_xscale("log")
            shown = 0.8 * min(1, rows["first_low"].min()), 1.4 * rows["first_high"].max()
            panel.set_xlim(*shown)
            ticks = [x for x in (0.25, 0.5, 1, 2, 4, 8, 16) if shown[0] <= x <= shown[1]]
            panel.set_xticks(ticks, [f"{x:g}" for x in ticks])
            panel.xaxis.set_minor_locator(NullLocator())
            panel.grid(visible=False, axis="y")
        axes[0].set_yticks(range(len(names)), map(press_label, names))
        axes[0].set_ylim(len(names) - 0.4, -0.6)
    context = pressed["context"].iloc[0]
    figure.set_label(
        f"Time to the first token of {context:,} tokens with each press over that without, medians "
        f"with {METHOD} over rounds; dotted: {SLOW:.2f}"
    )
    return figure


def _beside(panel: Axes, x: float, y: float, text: str) -> None:
    look: dict[str, Any] = {"va": "center", "fontsize": 7, "color": MUTED}
    panel.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", **look)


# ---- what fits -----------------------------------------------------------------------------------


def fits(table: pd.DataFrame) -> Figure:
    """Bars of what was measured, a mark at what arithmetic predicts; for the largest limit."""
    table = table[table["limit"] == table["limit"].max()]
    kinds = list(dict.fromkeys(table["what"]))
    most = max(len(rows) for _, rows in table.groupby("what"))
    figure, axes = new_figure(1, len(kinds), width=7.6, height=1.1 + 0.32 * most)
    with style():
        for panel, what in zip(axes, kinds, strict=True):
            rows = table[table["what"] == what]
            colours = [mechanism_colour(mechanism) for mechanism in rows["mechanism"]]
            bars = panel.barh(range(len(rows)), rows["measured"], 0.65, color=colours)
            texts = [f"{n:,}" for n in rows["measured"]]
            panel.bar_label(bars, texts, label_type="center", color="white", fontsize=8.5)
            panel.plot(rows["predicted"], range(len(rows)), "|", color=INK, markersize=12)
            panel.set_yticks(range(len(rows)), list(_labels(rows)))
            panel.invert_yaxis()
            panel.grid(visible=False, axis="y")
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            panel.xaxis.set_major_formatter("{x:,.0f}")
            panel.set_xlim(0, 1.15 * max(rows["predicted"].max(), rows["measured"].max()))
            panel.set_title(fits_of(what, rows["other"].iloc[0]))
    figure.set_label(
        f"What fits in {size_of(table['limit'].iloc[0])} with the weights: measured (bars), by "
        "arithmetic (marks)"
    )
    return figure


def _labels(rows: pd.DataFrame) -> Iterator[str]:
    for press, ratio in zip(rows["press"], rows["ratio"], strict=True):
        yield NO_PRESS if press == NO_PRESS else f"{press_label(press)}, {ratio:.0%}"
