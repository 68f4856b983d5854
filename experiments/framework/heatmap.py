"""Matrices: a colour and a word or number in each cell of a figure, words in those of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from experiments.framework.plots import CELL_INK, new_figure, style
from experiments.framework.tables import ResultTable


@dataclass(frozen=True)
class OutcomeMatrix:
    """What came of each mechanism (columns) in each of several cases (rows).

    Attributes:
        outcomes: by row and column; None: not run.
        looks: by outcome, from the best to the worst, what a cell of the figure says and its
            colour (`"#rrggbb"`). The table leaves the best blank.
    """

    outcomes: pd.DataFrame
    looks: Mapping[str, tuple[str, str]]

    @classmethod
    def of(
        cls, table: pd.DataFrame, row: str, looks: Mapping[str, tuple[str, str]]
    ) -> OutcomeMatrix:
        """From a column `mechanism`, a column `row` and the worst in a column `outcome`."""
        order = list(looks)
        worst = table.pivot_table(
            "outcome", row, "mechanism", aggfunc=lambda had: max(had, key=order.index), sort=False
        )
        return cls(worst, looks)

    def table(self, note: str) -> ResultTable:
        """As a table of words."""
        words = self.outcomes.fillna("not run").replace(next(iter(self.looks)), "")
        rows = words.reset_index().to_numpy().tolist()
        return ResultTable(note, ["", *words.columns], rows, left=None)

    def figure(self, label: str) -> Figure:
        """As a figure, with a legend; `label` says what it shows."""
        handles = [
            Line2D([], [], color=colour, marker="s", ms=9, ls="none", label=f"{mark}  {outcome}")
            for outcome, (mark, colour) in self.looks.items()
        ]
        shown = self.outcomes.rename(index=lambda row: fill(row, 28))  # as narrow as a phone
        cells: Any = shown.stack().dropna().map(self.looks.get).to_dict()
        n_rows, n_columns = shown.shape
        figure, (panel,) = new_figure(width=2.2 + 0.22 * n_columns, height=2.1 + 0.26 * n_rows)
        with style():
            draw_cells(panel, list(shown.index), list(shown.columns), cells)
            figure.legend(handles=handles, loc="outside lower left", ncols=1)
        figure.set_label(label)
        return figure


def draw_cells(
    panel: Axes,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], tuple[str, str]],
) -> None:
    """Fill `panel` with a matrix.

    Args:
        rows: labels, from the top.
        columns: labels, written slanted above the matrix.
        cells: by row and column, the text and the colour (`"#rrggbb"`); others stay empty.
    """
    for (row, column), (text, colour) in cells.items():
        x, y = columns.index(column), rows.index(row)
        panel.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, linewidth=0))
        if text:
            ink = "white" if _is_dark(colour) else CELL_INK
            panel.text(x, y, text, ha="center", va="center", fontsize=7.5, color=ink)
    panel.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    panel.set_xticks(range(len(columns)), columns, rotation=50, ha="left", rotation_mode="anchor")
    panel.set_yticks(range(len(rows)), rows)
    panel.xaxis.tick_top()
    panel.grid(visible=False)
    panel.spines[:].set_visible(False)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 130
