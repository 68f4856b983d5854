"""Figures of numbers side by side: a dot and its interval per row, or a bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.framework.experiment import Contrast
from experiments.framework.plots import MECHANISM_LOOKS, MUTED, new_figure, style


def ratio_figure(panels: Mapping[str, pd.DataFrame], what: str, mark: float = 1) -> Figure:
    """A panel for each table.

    Args:
        panels: by title; columns `label`, `mechanism`, `ratio`, `low`, `high`.
        what: is divided by what.
        mark: where a line is drawn: what makes no difference.
    """
    heights = [len(rows) for rows in panels.values()]
    height = 0.5 + 0.45 * len(panels) + 0.19 * sum(heights)
    shared: dict[str, Any] = {"sharex": True, "height_ratios": heights}
    figure, axes = new_figure(len(panels), width=5.2, height=height, **shared)
    with style():
        for panel, (title, rows) in zip(axes, panels.items(), strict=True):
            panel.axvline(mark, color=MUTED, linewidth=1)
            for y, row in enumerate(rows.to_dict("records")):
                colour, marker = MECHANISM_LOOKS[row["mechanism"]]
                panel.plot([row["low"], row["high"]], [y, y], color=colour)
                panel.plot(row["ratio"], y, color=colour, marker=marker)
            panel.set_yticks(range(len(rows)), rows["label"])
            panel.set_ylim(len(rows) - 0.4, -0.6)
            panel.grid(visible=False, axis="y")
            panel.set_title(title)
        axes[-1].set_xlabel(what)
    return figure


_MECHANISMS = {"hooks": "hook", "patches": "patch"}


def overview(contrasts: Sequence[Contrast]) -> Figure:
    """A panel for each contrast, with a bar for each of its numbers."""
    heights = [len(contrast.bars) for contrast in contrasts]
    figure, axes = new_figure(
        len(contrasts),
        width=5.2,
        height=0.3 * sum(heights) + 0.45 * len(contrasts),
        height_ratios=heights,
    )
    with style():
        for panel, contrast in zip(axes, contrasts, strict=True):
            names, values = list(contrast.bars), list(contrast.bars.values())
            colours = [MECHANISM_LOOKS[_MECHANISMS.get(name, "bare")][0] for name in names]
            bars = panel.barh(range(len(names)), values, 0.7, color=colours)
            panel.bar_label(bars, [f"{value:,.3g}" for value in values], padding=4)
            panel.set_yticks(range(len(names)), names)
            panel.set(xlim=(0, 1.15 * max(*values, 1e-9)), xticks=[])
            panel.invert_yaxis()
            panel.grid(False)
            panel.spines["bottom"].set_visible(False)
            panel.set_title(contrast.title)
    figure.set_label(
        "Hooks and patches side by side; in grey the worst of the other mechanisms, where tried"
    )
    return figure
