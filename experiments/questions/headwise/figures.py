"""Figures of `experiments.questions.headwise`: one for each of its tables that can be drawn."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from experiments.framework.intervals import METHOD
from experiments.framework.plots import (
    CELL_INK,
    INK,
    MUTED,
    NO_PRESS,
    legend_outside,
    mechanism_colour,
    new_figure,
    percent_axis,
    press_colour,
    style,
)
from experiments.questions.headwise.budgets import ALL, HEADWISE, UNIFORM
from experiments.testbed.decoding import FULL
from experiments.testbed.variants import VARIANTS

_BUDGETS: dict[str, dict[str, Any]] = {
    UNIFORM: {"color": mechanism_colour("bare"), "marker": "o", "linestyle": (0, (4, 1.5))},
    HEADWISE: {"color": press_colour("ObservedAttentionPress"), "marker": "s"},
}
_LOOKS: dict[str, dict[str, Any]] = {
    FULL: {"color": MUTED, "linewidth": 1, "linestyle": (0, (5, 3))},
    UNIFORM: {"color": INK, "marker": "D"},
    "fake keys": {"color": mechanism_colour("empty wrapper"), "marker": "v"},
    "mask by patch": {"color": mechanism_colour("patch"), "marker": "s"},
    "mask by hook": {"color": mechanism_colour("hook"), "marker": "o"},
    "ragged": {"color": press_colour("ObservedAttentionPress"), "marker": "^"},
}
"""Looks by variant, in the order of the legend."""

HEAT_MAPS = ("AdaKV(SnapKV)", "DuoAttention", "KVzip")
"""The presses whose head budgets are drawn."""


def accuracy(table: pd.DataFrame) -> Figure:
    """Accuracy against the bytes held, a panel for each pair of presses."""
    pressed = table[table["press"] != NO_PRESS]
    names = list(dict.fromkeys(pressed["pair"]))
    grid = {"sharex": True, "sharey": True}
    rows_of_panels = -(-len(names) // 2)
    figure, axes = new_figure(rows_of_panels, 2, width=5.4, height=1.9 * rows_of_panels, **grid)
    for panel, name in zip(axes, names, strict=False):
        of_pair = pressed[pressed["pair"] == name].sort_values("bytes")
        presses = of_pair.groupby("budgets")["press"].first()
        for budgets, look in _BUDGETS.items():
            rows = of_pair[of_pair["budgets"] == budgets]
            panel.plot(rows["bytes"], rows["accuracy"], label=f"{budgets} budgets", **look)
            band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
            panel.fill_between(rows["bytes"], rows["low"], rows["high"], **band)
        panel.set_title(f"{presses[HEADWISE]}\nand {presses[UNIFORM]}")
        panel.set_xlim(left=0)
        percent_axis(panel.xaxis)
        percent_axis(panel.yaxis)
    for panel in axes[len(names) :]:
        panel.set_axis_off()
    axes[0].set_ylim(-0.03, 1.03)
    figure.supxlabel("bytes of the cache, over those of the full one", fontsize=9)
    figure.supylabel("right answers", fontsize=9)
    shown = axes[0].get_legend_handles_labels()[0]
    figure.legend(handles=shown, loc="outside upper left", ncols=2)
    figure.set_label(
        "Right answers against the bytes that the cache holds, with uniform and with head-wise "
        "budgets, a panel for each pair of presses; "
        f"bands are {METHOD} over contexts"
    )
    return figure


def difference(table: pd.DataFrame) -> Figure:
    """Head-wise minus uniform accuracy with its interval, by pair and ratio."""
    pairs = list(dict.fromkeys(table["pair"]))
    ratios = sorted(table["ratio"].dropna().unique())
    figure, (panel,) = new_figure(width=7.2, height=0.9 + 0.55 * len(pairs))
    panel.axvline(0, color=MUTED, linewidth=1)
    for index, ratio in enumerate(ratios):
        rows = table[table["ratio"] == ratio]
        offset = 0.66 * (index + 0.5) / len(ratios) - 0.33
        places = [pairs.index(pair) + offset for pair in rows["pair"]]
        shade = _BUDGETS[HEADWISE]["color"], 0.35 + 0.65 * index / max(len(ratios) - 1, 1)
        panel.hlines(places, rows["low"], rows["high"], color=[shade], linewidth=1.8)
        look: dict[str, Any] = {"color": shade, "marker": "s", "linestyle": "none"}
        panel.plot(rows["difference"], places, label=f"{ratio:.0%} evicted", **look)
    names = ["mean of all" if pair == ALL else pair for pair in pairs]
    panel.set_yticks(range(len(pairs)), names)
    panel.set_ylim(len(pairs) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
    panel.set_xlabel("right answers, head-wise minus uniform budgets (points)")
    panel.xaxis.set_major_formatter(
        FuncFormatter(lambda share, _: f"{100 * share:+.0f}" if share else "0")
    )
    legend_outside(figure, panel)
    figure.set_label(
        "Right answers with head-wise budgets minus those with uniform ones, in percentage points, "
        "by press and share evicted; "
        f"bars are {METHOD} over contexts"
    )
    return figure


def budgets(table: pd.DataFrame) -> Figure:
    """Heat maps of the share of its tokens that each head keeps."""
    ratio = min(table["ratio"].unique(), key=lambda ratio: (abs(ratio - 0.8), ratio))
    shown = table[(table["ratio"] == ratio) & table["press"].isin(HEAT_MAPS)]
    names = list(dict.fromkeys(shown["press"]))
    n_layers, n_heads = shown["layer"].max() + 1, shown["head"].max() + 1
    height = 1.3 + 0.42 * n_layers
    figure, axes = new_figure(1, len(names), width=9.0, height=height, sharey=True)
    for panel, name in zip(axes, names, strict=True):
        shares = shown[shown["press"] == name].pivot_table("share", "layer", "head")
        image = panel.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        panel.set_title(f"{name}, {ratio:.0%} evicted")
        panel.set_xlabel("KV head")
        panel.set_xticks(range(n_heads))
        panel.grid(visible=False)
        if n_layers * n_heads <= 64:  # with more of them numbers would not be readable
            _write_shares(panel, shares)
    axes[0].set_yticks(range(n_layers))
    axes[0].set_ylabel("layer")
    whole = PercentFormatter(xmax=1, decimals=0)
    figure.colorbar(image, ax=axes, label="share of its tokens that a head keeps", format=whole)
    figure.set_label(f"Share of its tokens that each KV head keeps, {ratio:.0%} evicted in all")
    return figure


def _write_shares(panel: Axes, shares: pd.DataFrame) -> None:
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    for layer, of_layer in enumerate(shares.to_numpy()):
        for head, share in enumerate(of_layer):
            ink = "white" if share > 0.55 else CELL_INK
            panel.text(head, layer, f"{share:.0%}", color=ink, **look)


def decoding(table: pd.DataFrame) -> Figure:
    """Time against context length at each ratio, and bytes, over those of the full cache."""
    ratios = sorted(table.loc[table["condition"] != FULL, "ratio"].unique())
    n_panels = len(ratios) + 1
    figure, axes = new_figure(1, n_panels, width=3.0 * n_panels, height=3.4)
    *timed, last = axes
    for panel, ratio in zip(timed, ratios, strict=True):
        _draw_times(panel, table[table["ratio"] == ratio])
        panel.set_title(f"Time, {ratio:.0%} evicted")
        panel.sharey(timed[0])
    timed[0].set_ylabel("step / step on the full cache")
    # Few rounds give wide intervals or none; medians are always in the figure.
    timed[0].set_ylim(0, min(1.5 * table["time"].max(), 1.05 * table["high"].max()))
    _draw_bytes(last, table)
    legend_outside(figure, axes[0], handles=[_handle(name) for name in _LOOKS])
    figure.set_label(
        "Time of a decode step on uniform and on head-wise caches, over that on the full cache, by "
        "tokens seen; and bytes that they hold"
    )
    return figure


def _draw_times(panel: Axes, table: pd.DataFrame) -> None:
    contexts = sorted(table["context"].unique())
    panel.axhline(1, **_LOOKS[FULL])
    for name in (UNIFORM, *VARIANTS):
        rows = table[table["condition"] == name].sort_values("context")
        panel.plot(rows["context"], rows["time"], **_LOOKS[name])
        band = {"color": _LOOKS[name]["color"], "alpha": 0.12, "linewidth": 0}
        panel.fill_between(rows["context"], rows["low"], rows["high"], **band)
    panel.set_xscale("log", base=2)
    panel.set_xticks(contexts, [f"{context / 1024:g}k" for context in contexts])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("tokens seen")


def _draw_bytes(panel: Axes, table: pd.DataFrame) -> None:
    longest = table[table["context"] == table["context"].max()]
    panel.axhline(1, **_LOOKS[FULL])
    # What coincides is drawn in different sizes, the largest first.
    for size, name in zip((10, 7.5, 5, 7.5, 5), (*VARIANTS, UNIFORM), strict=True):
        rows = longest[longest["condition"] == name].sort_values("ratio")
        share = rows["bytes"] / rows["full_bytes"]
        panel.plot(rows["ratio"], share, **_LOOKS[name] | {"markersize": size})
    panel.set_title("Bytes held")
    panel.set_ylim(0, 1.08)
    panel.set_ylabel("cache / full cache")
    panel.set_xlabel("share of the tokens evicted")
    panel.set_xticks(sorted(longest.loc[longest["condition"] != FULL, "ratio"].unique()))
    panel.margins(x=0.3)
    percent_axis(panel.xaxis)


def _handle(name: str) -> Line2D:
    label = {FULL: "full cache", UNIFORM: "uniform budgets"}.get(name, f"head-wise, {name}")
    return Line2D([], [], label=label, **_LOOKS[name])


_FIGURES = {
    "headwise_accuracy": accuracy,
    "headwise_difference": difference,
    "headwise_budgets": budgets,
    "headwise_decoding": decoding,
}


def figures(tables: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    """A figure for each of the tables that can be drawn, by the table's name."""
    with style():
        return {name: draw(tables[name]) for name, draw in _FIGURES.items() if name in tables}
