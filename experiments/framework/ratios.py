"""Figures of ratios: a dot and its interval per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.framework.plots import (
    MUTED,
    mechanism_colour,
    mechanism_marker,
    new_figure,
    style,
)


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
                colour, marker = (
                    of(row["mechanism"]) for of in (mechanism_colour, mechanism_marker)
                )
                panel.plot([row["low"], row["high"]], [y, y], color=colour)
                panel.plot(row["ratio"], y, color=colour, marker=marker)
            panel.set_yticks(range(len(rows)), rows["label"])
            panel.set_ylim(len(rows) - 0.4, -0.6)
            panel.grid(visible=False, axis="y")
            panel.set_title(title)
        axes[-1].set_xlabel(what)
    return figure
