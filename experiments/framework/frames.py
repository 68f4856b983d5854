"""Data frames as people see them: heat maps, and tables with a cell per press and condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from experiments.framework.heatmap import draw_cells
from experiments.framework.plots import new_figure, style
from experiments.framework.tables import ResultTable


def heat_maps(
    tables: Mapping[str, pd.DataFrame], label: str, form: str = "{:.0%}", columns: int = 1
) -> Figure:
    """A panel for each table of numbers that are not negative, the largest of all the darkest.

    Args:
        tables: by title; labels of rows and columns are shown as they are, NaN as no cell.
        label: what the figure shows, in words.
        form: how numbers are written.
        columns: of panels.
    """
    most = max(table.max().max() for table in tables.values()) or 1.0
    size = max(len(table) for table in tables.values())
    n_cells, n_rows = max(table.shape[1] for table in tables.values()), -(-len(tables) // columns)
    width = max(4.2, 1.4 + columns * (0.4 + 0.45 * n_cells))  # titles need some
    height = n_rows * (0.9 + 0.23 * size)
    figure, axes = new_figure(n_rows, columns, width=width, height=height, sharey=True)
    with style():
        for panel in axes[len(tables) :]:
            panel.set_visible(False)
        for panel, (title, table) in zip(axes, tables.items(), strict=False):
            cells: Any = {
                (row, column): (form.format(number), to_hex(colormaps["Blues"](number / most)))
                for row, numbers in table.to_dict("index").items()
                for column, number in numbers.items()
                if pd.notna(number)
            }
            draw_cells(panel, list(table.index), list(table.columns), cells)
            panel.set_title(title)
    figure.set_label(label)
    return figure


def frame_table(note: str, frame: pd.DataFrame, left: int | None = 1) -> ResultTable:
    """The columns of a data frame; see `ResultTable`."""
    return ResultTable(note, list(frame.columns), frame.to_numpy().tolist(), left)


def wide_table(
    note: str, rows: pd.DataFrame, index: Sequence[str], columns: str, cells: Sequence[str]
) -> ResultTable:
    """`cells`, a text for each of `rows`, by the columns `index` and `columns`, as they come."""
    wide = rows.assign(cell=cells).pivot_table(
        "cell", list(index), columns, aggfunc="first", sort=False, fill_value=""
    )
    return frame_table(note, wide.reset_index(), len(index))
