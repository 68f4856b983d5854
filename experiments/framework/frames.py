"""Data frames for readers: matrices of coloured cells, and tables of text."""

from collections.abc import Mapping, Sequence
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from experiments.framework.plots import CELL_INK, new_figure, style
from experiments.framework.tables import ResultTable

# ---- matrices: a colour and a word or number in each cell ----------------------------------------


def heat_maps(
    tables: Mapping[str, pd.DataFrame], label: str, form: str = "{:.0%}", columns: int = 1
) -> Figure:
    """Heat maps of non-negative numbers, a panel for each table, with one colour scale for all.

    Args:
        tables: by title; index and column labels become the tick labels, NaN an empty cell.
        label: what the figure shows, in words.
        form: format of the numbers.
        columns: number of panels in a row.
    """
    most = max(table.max().max() for table in tables.values()) or 1.0
    size = max(len(table) for table in tables.values())
    n_cells, n_rows = max(table.shape[1] for table in tables.values()), -(-len(tables) // columns)
    width = max(4.2, 1.4 + columns * (0.4 + 0.45 * n_cells))  # wide enough for titles
    height = n_rows * (0.9 + 0.23 * size)
    figure, axes = new_figure(n_rows, columns, width=width, height=height, sharey=True)

    def look(number: float) -> tuple[str, str]:
        return form.format(number), to_hex(colormaps["Blues"](number / most))

    with style():
        for panel in axes[len(tables) :]:
            panel.set_visible(False)
        for panel, (title, table) in zip(axes, tables.items(), strict=False):
            _draw_cells(panel, table.map(look, na_action="ignore"))
            panel.set_title(title)
    figure.set_label(label)
    return figure


class OutcomeMatrix:
    """The worst outcome of each mechanism (columns) in each of several cases (rows).

    Args:
        table: has the columns `mechanism` and `outcome`, and the column that `row` names.
        row: the column with the cases.
        looks: by outcome, from best to worst, the text of a cell in the figure and its colour
            (`"#rrggbb"`). In the table the best outcome is an empty cell.
    """

    def __init__(self, table: pd.DataFrame, row: str, looks: Mapping[str, tuple[str, str]]) -> None:
        order, self._looks = list(looks), looks
        self._outcomes = table.pivot_table(
            "outcome", row, "mechanism", aggfunc=lambda each: max(each, key=order.index), sort=False
        )

    def table(self, note: str) -> ResultTable:
        """The matrix as a table of text."""
        words = self._outcomes.fillna("not run").replace(next(iter(self._looks)), "")
        return frame_table(note, words.rename_axis(index="").reset_index(), None)

    def figure(self, label: str) -> Figure:
        """The matrix as a figure with a legend; `label` says what it shows."""
        handles = [
            Line2D([], [], color=colour, marker="s", ms=9, ls="none", label=f"{mark}  {outcome}")
            for outcome, (mark, colour) in self._looks.items()
        ]
        shown = self._outcomes.rename(index=lambda row: fill(row, 28))  # narrow enough for a phone
        (n_rows, n_columns), wraps = shown.shape, shown.index.str.contains("\n").any()
        height = 2.1 + (0.34 if wraps else 0.26) * n_rows
        figure, (panel,) = new_figure(width=2.2 + 0.22 * n_columns, height=height)
        with style():
            _draw_cells(panel, shown.map(self._looks.get, na_action="ignore"))
            figure.legend(handles=handles, loc="outside lower left", ncols=1)
        figure.set_label(label)
        return figure


def _draw_cells(panel: Axes, cells: pd.DataFrame) -> None:
    """Fill `panel` with a matrix; the column labels are slanted above it.

    Args:
        cells: text and colour (`"#rrggbb"`) of each cell; NaN: the cell stays empty.
    """
    rows, columns = list(cells.index), list(cells.columns)
    for (y, x), look in np.ndenumerate(cells.to_numpy()):
        if isinstance(look, tuple):
            text, colour = look
            panel.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour, linewidth=0))
            if text:
                ink = "white" if np.dot(to_rgb(colour), (0.3, 0.59, 0.11)) < 130 / 255 else CELL_INK
                panel.text(x, y, text, ha="center", va="center", fontsize=7.5, color=ink)
    panel.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    panel.set_xticks(range(len(columns)), columns, rotation=50, ha="left", rotation_mode="anchor")
    panel.set_yticks(range(len(rows)), rows)
    panel.xaxis.tick_top()
    panel.grid(visible=False)
    panel.spines[:].set_visible(False)


# ---- tables of text ------------------------------------------------------------------------------


def frame_table(note: str, frame: pd.DataFrame, left: int | None = 1) -> ResultTable:
    """A data frame as a `ResultTable`, without its index."""
    return ResultTable(note, list(frame.columns), frame.to_numpy().tolist(), left)


def wide_table(
    note: str, rows: pd.DataFrame, index: Sequence[str], columns: str, cells: Sequence[str]
) -> ResultTable:
    """A pivot table of `cells`, one text for each of `rows`, in the order of `rows`.

    Args:
        index: columns of `rows` that become the leading columns.
        columns: column of `rows` whose values become the other columns.
    """
    wide = rows.assign(cell=cells).pivot_table(
        "cell", list(index), columns, aggfunc="first", sort=False, fill_value=""
    )
    return frame_table(note, wide.reset_index(), len(index))
