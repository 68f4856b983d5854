"""The first figure of the report: hooks against patches, in one number each."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments.framework.experiment import Contrast
from experiments.framework.plots import mechanism_colour, new_figure, style

_COLOURS = {"hooks": mechanism_colour("hook"), "patches": mechanism_colour("patch")}
_OTHER = mechanism_colour("bare")


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
            colours = [_COLOURS.get(name, _OTHER) for name in names]
            bars = panel.barh(range(len(names)), values, 0.7, color=colours)
            panel.bar_label(bars, [f"{value:,.3g}" for value in values], padding=4)
            panel.set_yticks(range(len(names)), names)
            panel.set_xlim(0, 1.15 * max(*values, 1e-9))
            panel.set_xticks([])
            panel.invert_yaxis()
            panel.grid(False)
            panel.spines["bottom"].set_visible(False)
            panel.set_title(contrast.title)
    figure.set_label(
        "Hooks and patches side by side; in grey the worst of the other mechanisms, where tried"
    )
    return figure
