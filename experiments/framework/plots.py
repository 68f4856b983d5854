"""The one look of the study's figures: style, colours of mechanisms, small helpers.

```python
with style():
    figure, (left, right) = new_figure(columns=2)
    left.plot(x, y, color=ORANGE)
save(figure, Path("figure.svg"))
```

Figures are made without pyplot, so that drawing them leaves no state behind: no figure manager, no
backend chosen, no setting of matplotlib changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.framework.experiment import Contrast

_STYLE: Any = matplotlib.rc_params_from_file(
    Path(__file__).with_name("study.mplstyle"), use_default_template=False
)
INK, MUTED, GRID = (_STYLE[name] for name in ("text.color", "axes.edgecolor", "grid.color"))
"""Colours of text, of what should stay in the background, and of grid lines; see `svg`."""

CELL_INK = "#1a1a1a"
"""Colour of text on light cells, which stay light in dark mode."""

NO_PRESS = "no press"
"""What tables call the model without a press."""

# From the palette of Okabe and Ito, told apart with any colour vision.
_BLACK, ORANGE, GREEN = "#000000", "#E69F00", "#009E73"
_BLUE, _VERMILLION, PURPLE, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C"

MECHANISM_LOOKS: dict[str, tuple[str, str]] = {
    "bare": (_GREY, "D"),
    "hook": (_BLUE, "o"),
    "patch": (_VERMILLION, "s"),
    "kvpress": (GREEN, "^"),
}
"""The colour and the marker, in matplotlib's letters, of each mechanism in every figure."""

_OF_BARS = {"hooks": "hook", "patches": "patch"}
"""Mechanisms by what a `Contrast` calls them."""

style = partial(matplotlib.rc_context, _STYLE)
"""Opens the study's settings of matplotlib, for as long as a block lasts."""


def new_figure(
    rows: int = 1,
    columns: int = 1,
    *,
    width: float = 7.2,
    height: float = 3.4,
    **subplots: Any,
) -> tuple[Figure, list[Axes]]:
    """An empty figure in the study's style.

    Args:
        rows, columns: grid of panels.
        width, height: of the whole figure, in inches.
        subplots: passed on to `Figure.subplots`, such as `sharey=True`.

    Returns:
        The figure, and its panels row by row.
    """
    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False, **subplots).flat)
        for panel in axes:
            # Ticks are made when the figure is drawn, perhaps outside of the style.
            panel.tick_params(length=0, labelsize=_STYLE["xtick.labelsize"], labelcolor=INK)
            panel.grid(color=GRID, linewidth=_STYLE["grid.linewidth"])
    return figure, axes


def press_label(name: str) -> str:
    """What figures and tables call a press: `"SnapKVPress"` is `"SnapKV"`."""
    return name.removesuffix("Press")


# ---- numbers side by side -----------------------------------------------------------------------


def ratio_figure(
    panels: Mapping[str, pd.DataFrame], label: str, what: str, mark: float = 1
) -> Figure:
    """A panel for each table.

    Args:
        panels: by title; columns `label`, `mechanism`, `ratio`, `low`, `high`.
        label: what the figure shows, in words.
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
    figure.set_label(label)
    return figure


def overview(contrasts: Sequence[Contrast]) -> Figure:
    """A panel for each contrast, with a bar for each of its numbers."""
    heights = [len(contrast.bars) for contrast in contrasts]
    height = 0.3 * sum(heights) + 0.45 * len(contrasts)
    figure, axes = new_figure(len(contrasts), width=5.2, height=height, height_ratios=heights)
    with style():
        for panel, contrast in zip(axes, contrasts, strict=True):
            names, values = list(contrast.bars), list(contrast.bars.values())
            colours = [MECHANISM_LOOKS[_OF_BARS.get(name, "bare")][0] for name in names]
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


# ---- files and pages ----------------------------------------------------------------------------

_THEMED = {INK: "var(--ink)", _BLACK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)"}
"""Colours that a page sets for its light and its dark mode."""


_SCHEMES = (
    "<style>svg{--ink:#1c1e21;--muted:#5c636b;--line:#dfe3e8;font-family:sans-serif}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e4e6e9;--muted:#a0a7af;--line:#343a41}}</style>"
)
"""What a figure in a file of its own says of these colours."""


def save(figure: Figure, path: Path) -> None:
    """Write a figure to an SVG file whose text can be read on light and on dark paper."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = svg(figure, salt=path.stem)
    start = drawn.index(">") + 1
    path.write_text(f"{drawn[:start]}{_SCHEMES}{drawn[start:]}\n", encoding="utf-8")


def svg(figure: Figure, salt: str) -> str:
    """A figure as an `<svg>` element without background, for a page that sets `--ink` and so on.

    Its words take the page's font.

    The same figure gives the same text.

    Args:
        salt: makes the names of its parts differ from those of other figures on the page.
    """
    drawn = StringIO()
    with style(), matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    text = drawn.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # The same ids in every figure, and nothing refers to them.
    text = re.sub(r' id="(?:\w+_\d+|matplotlib\.\w+)"', "", text)
    # Coordinates are cut after a hundredth of a point; words are not.
    text = re.sub("<[^>]+>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"| font-family: [^;"]*;?', "", text)
    text = re.sub(r"> <", "><", text)
    for colour, themed in _THEMED.items():
        text = text.replace(colour, themed)
    return text
