"""Matrices as figures: a colour and a word or number in each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from experiments.framework.plots import INK


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
        ink = "white" if _is_dark(colour) else INK
        panel.text(x, y, text, ha="center", va="center", fontsize=7.5, color=ink)
    panel.set_xlim(-0.5, len(columns) - 0.5)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xticks(range(len(columns)), columns, rotation=40, ha="left", rotation_mode="anchor")
    panel.set_yticks(range(len(rows)), rows)
    panel.xaxis.tick_top()
    panel.grid(visible=False)
    for spine in panel.spines.values():
        spine.set_visible(False)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 130
