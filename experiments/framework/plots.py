"""The common style of the study's figures: settings, colours of mechanisms, small helpers.

```python
with style():
    figure, (left, right) = new_figure(columns=2)
    left.plot(x, y, color=ORANGE)
save(figure, Path("figure.svg"))
```

Figures are made without pyplot, so drawing them leaves no global state: no figure manager, no
selected backend, no changed setting of matplotlib.
"""

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
from experiments.framework.manifest import write_at_once

_STYLE: Any = matplotlib.rc_params_from_file(
    Path(__file__).with_name("study.mplstyle"), use_default_template=False
)
INK, MUTED, GRID = (_STYLE[name] for name in ("text.color", "axes.edgecolor", "grid.color"))
"""Colours of text, of axes and reference lines, and of grid lines; see `svg`."""

CELL_INK = "#1a1a1a"
"""Colour of text on light cells, which stay light in dark mode."""

NO_PRESS = "no press"
"""Name of the model without a press in tables."""

# From the palette of Okabe and Ito, which is safe for colour-blind readers.
_BLACK, ORANGE, GREEN = "#000000", "#E69F00", "#009E73"
_BLUE, _VERMILLION, PURPLE, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C"

MECHANISM_LOOKS: dict[str, tuple[str, str]] = {
    "bare": (_GREY, "D"),
    "hook": (_BLUE, "o"),
    "patch": (_VERMILLION, "s"),
    "kvpress": (GREEN, "^"),
}
"""The colour and the matplotlib marker of each mechanism in every figure."""

_OF_BARS = {"hooks": "hook", "mask by hook": "hook", "patches": "patch", "ragged": "patch"}
"""Mechanisms by their names in a `Contrast`."""

style = partial(matplotlib.rc_context, _STYLE)
"""A context manager with the study's settings of matplotlib."""


def new_figure(
    rows: int = 1, columns: int = 1, *, width: float = 7.2, height: float = 3.4, **subplots: Any
) -> tuple[Figure, list[Axes]]:
    """An empty figure in the study's style.

    Args:
        rows, columns: size of the grid of panels.
        width, height: size of the whole figure, in inches.
        subplots: passed to `Figure.subplots`, such as `sharey=True`.

    Returns:
        The figure, and its panels row by row.
    """
    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False, **subplots).flat)
        for panel in axes:
            # Ticks are created when the figure is drawn, perhaps outside of the style.
            panel.tick_params(length=0, labelsize=_STYLE["xtick.labelsize"], labelcolor=INK)
            panel.grid(color=GRID, linewidth=_STYLE["grid.linewidth"])
    return figure, axes


def press_label(name: str) -> str:
    """Name of a press in figures and tables: `"SnapKV"` for `"SnapKVPress"`."""
    return "/".join(each.removesuffix("Press") for each in press_classes(name).split(" / "))


def is_own(name: str) -> bool:
    """Whether a name is that of a class of the user's own, `"my_module:MyPress"`, or of two."""
    return re.match(r"[\w.]+:", name) is not None


def press_classes(name: str) -> str:
    """`name`, with classes of the user's own, `"my_module:MyPress,..."`, without their modules."""
    return " / ".join(dict.fromkeys(each.rpartition(":")[2] for each in name.split(",")))


# ---- numbers side by side -----------------------------------------------------------------------


def ratio_figure(
    panels: Mapping[str, pd.DataFrame], label: str, what: str, mark: float = 1
) -> Figure:
    """Ratios with their intervals, in a panel for each table.

    Args:
        panels: tables by title, with columns `label`, `mechanism`, `ratio`, `low`, `high`.
        label: what the figure shows, in words.
        what: label of the x-axis: numerator and denominator of the ratio.
        mark: x of a vertical reference line: the ratio that means no difference.
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
    """Contrasts as bar charts: a panel for each contrast, a bar for each of its numbers."""
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
        "Hooks and patches side by side, times over the bare model's; in grey the worst of others"
    )
    return figure


# ---- files and pages ----------------------------------------------------------------------------

_THEMED = {INK: "var(--ink)", _BLACK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)"}
"""Colours that become CSS variables, so that a page can set them for light and dark mode."""


_SCHEMES = (
    "<style>svg{--ink:#1c1e21;--muted:#5c636b;--line:#dfe3e8;font-family:sans-serif}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e4e6e9;--muted:#a0a7af;--line:#343a41}}</style>"
)
"""Values of these CSS variables in a standalone SVG file."""


def save(figure: Figure, path: Path) -> None:
    """Write a figure to an SVG file that can be read in light and in dark mode."""
    drawn = svg(figure, salt=path.stem)
    start = drawn.index(">") + 1
    write_at_once(path, f"{drawn[:start]}{_SCHEMES}{drawn[start:]}\n".encode())


def svg(figure: Figure, salt: str) -> str:
    """A figure as an `<svg>` element without background, for a page that sets `--ink` and so on.

    Its text uses the page's font. The same figure gives the same output.

    Args:
        salt: makes the ids of its elements differ from those of other figures on the page.
    """
    drawn = StringIO()
    with style(), matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    text = drawn.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # These ids are the same in every figure, and nothing refers to them.
    text = re.sub(r' id="(?:\w+_\d+|matplotlib\.\w+)"', "", text)
    # Coordinates inside tags are cut to two decimals; text between tags is kept.
    text = re.sub("<[^>]+>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"| font-family: [^;"]*;?', "", text)
    text = re.sub(r"> <", "><", text)
    for colour, themed in _THEMED.items():
        text = text.replace(colour, themed)
    return text
