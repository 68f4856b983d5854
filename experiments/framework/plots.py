"""The one look of the study's figures: style, colours of presses and mechanisms, small helpers.

```python
with style():
    figure, (left, right) = new_figure(columns=2)
    left.plot(x, y, **press_line("SnapKVPress"))
    percent_axis(left.yaxis)
    legend_outside(figure, left)
save(figure, Path("figure.svg"))
```

Figures are made without pyplot, so that drawing them leaves no state behind: no figure manager, no
backend chosen, no setting of matplotlib changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from hooks_impl import PRESSES

INK, MUTED, GRID = "#222222", "#6b6b6b", "#e4e4e4"
"""Colours of text, of what should stay in the background, and of grid lines; see `svg`."""

CELL_INK = "#1a1a1a"
"""Colour of text on light cells, which stay light in dark mode."""

NO_PRESS = "no press"
"""What tables call the model without a press."""

# Typed loosely: matplotlib lists its settings as literals, other ones in every release.
_STYLE: Any = {
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so that figures agree everywhere
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}

# The palette of Okabe and Ito, told apart with any colour vision; its yellow is darkened, as it
# would vanish on white.
_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_GOLD, _BLUE, _VERMILLION, _PURPLE, _GREY = "#A58B00", "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C"

_COLOURS = (_GREY, _BLUE, _VERMILLION, _GREEN, _ORANGE, _PURPLE, _SKY, _GOLD, _BLACK)

_Dashes = tuple[float, ...]
_SOLID: _Dashes = ()
_DASHED: _Dashes = (4, 1.5)
_DOTTED: _Dashes = (1, 1.2)
_MIXED: _Dashes = (5, 1.2, 1, 1.2)
_TWO_DOTS: _Dashes = (5, 1.2, 1, 1.2, 1, 1.2)
_LONG: _Dashes = (9, 2)
_LINES = (_SOLID, _DASHED, _DOTTED, _MIXED, _LONG, _TWO_DOTS)

_Look = tuple[str, _Dashes]
_CHOSEN: dict[str, _Look] = {
    "RandomPress": (_GREY, _DOTTED),
    "StreamingLLMPress": (_GREY, _SOLID),
    "ObservedAttentionPress": (_GREEN, _SOLID),
    "SnapKVPress": (_BLUE, _SOLID),
    "PyramidKVPress": (_BLUE, _DASHED),
    "TOVAPress": (_SKY, _SOLID),
    "ExpectedAttentionPress": (_PURPLE, _SOLID),
    "KnormPress": (_ORANGE, _SOLID),
    "KeyDiffPress": (_VERMILLION, _SOLID),
    "KVzipPress": (_BLACK, _SOLID),
    "DuoAttentionPress": (_BLACK, _DASHED),
    "AdaKVPress": (_SKY, _DASHED),
    "CriticalKVPress": (_GREEN, _DOTTED),
    "CriticalAdaKVPress": (_SKY, _DOTTED),
    "ThinKPress": (_PURPLE, _MIXED),
}
"""Looks of the presses that are drawn most, like ones alike; the others get what is left."""

_MECHANISMS: dict[str, tuple[str, str]] = {
    "bare": (_GREY, "D"),
    "hook": (_BLUE, "o"),
    "patch": (_VERMILLION, "s"),
    "empty hook": (_SKY, "o"),
    "empty wrapper": (_ORANGE, "s"),
    "kvpress": (_GREEN, "^"),
}


@contextmanager
def style() -> Iterator[None]:
    """The study's settings of matplotlib, for as long as the block lasts."""
    with matplotlib.rc_context(_STYLE):
        yield


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


def press_colour(name: str) -> str:
    """The colour of a press, the same in every figure: `"#rrggbb"`."""
    return _press_look(name)[0]


def press_line(name: str) -> dict[str, Any]:
    """Keyword arguments of `Axes.plot` for the line of a press: colour, dashes and label.

    Presses that share a colour differ in their dashes.
    """
    colour, dashes = _press_look(name)
    # Dashed above solid: where two lines coincide both can be seen.
    line: dict[str, Any] = {"color": colour, "label": press_label(name), "zorder": 2}
    return line | ({"dashes": dashes, "zorder": 2.5} if dashes else {})


def press_label(name: str) -> str:
    """What figures and tables call a press: `"SnapKVPress"` is `"SnapKV"`."""
    return name.removesuffix("Press")


def _press_look(name: str) -> _Look:
    if name in _CHOSEN:
        return _CHOSEN[name]
    left = [look for look in product(_COLOURS, _LINES) if look not in _CHOSEN.values()]
    others = sorted(set(PRESSES) - set(_CHOSEN))
    return left[others.index(name) % len(left) if name in others else -1]


def mechanism_colour(name: str) -> str:
    """The colour of a mechanism ("hook", "patch", ...), the same in every figure.

    Raises:
        KeyError: if there is no such mechanism.
    """
    return _MECHANISMS[name][0]


def mechanism_marker(name: str) -> str:
    """The marker of a mechanism, in matplotlib's letters.

    Raises:
        KeyError: if there is no such mechanism.
    """
    return _MECHANISMS[name][1]


def percent_axis(axis: Axis) -> None:
    """Label an axis of shares in [0, 1] in per cent."""
    axis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def legend_outside(figure: Figure, axes: Axes, handles: Sequence[Artist] | None = None) -> None:
    """Put a legend to the right of all panels.

    Args:
        axes: the panel whose labelled artists are listed.
        handles: what to list instead, by its labels.
    """
    shown = axes.get_legend_handles_labels()[0] if handles is None else list(handles)
    with style():
        figure.legend(handles=shown, loc="outside right center", alignment="left", handlelength=2.6)


def label_lines(panel: Axes, gap: float = 0.06) -> None:
    """Write the labels of lines beside their ends, instead of a legend.

    Call it last: where the labels go depends on the limits of the axes.

    Args:
        gap: least height between two lines of text, in heights of the panel.
    """
    lines = [
        line
        for line in panel.get_lines()
        if not str(line.get_label()).startswith("_")
        and np.isfinite(np.asarray(line.get_ydata(), float)[-1])
    ]
    bottom, top = panel.get_ylim()
    ends = [(np.asarray(line.get_ydata(), float)[-1] - bottom) / (top - bottom) for line in lines]
    places = _apart(ends, [gap * (str(line.get_label()).count("\n") + 1.3) for line in lines])
    for line, end, place in zip(lines, ends, places, strict=True):
        right = float(np.asarray(line.get_xdata(), float)[-1])
        panel.annotate(
            str(line.get_label()),
            (right, end),
            xycoords=("data", "axes fraction"),
            xytext=(14, place),
            textcoords=("offset points", "axes fraction"),
            color=INK,
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "shrinkA": 0, "shrinkB": 3},
            va="center",
            fontsize=_STYLE["legend.fontsize"],
            annotation_clip=False,
        )


def _apart(places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Middles of boxes of these heights, as near to `places` as leaves none upon another."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    apart = list(places)
    for below, above in pairwise(order):
        least = apart[below] + (heights[below] + heights[above]) / 2
        apart[above] = max(apart[above], least)
    return apart


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
    text = re.sub("<[^>]+>", _rounded, text)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"| font-family: [^;"]*;?', "", text)
    text = re.sub(r"> <", "><", text)
    nested = 1
    while nested:  # groups that say nothing, from the inside out
        text, nested = re.subn(r"<g>((?:(?!</?g\b).)*)</g>", r"\1", text)
    for colour, themed in _THEMED.items():
        text = text.replace(colour, themed)
    return _with_classes(text, f"c{crc32(salt.encode()):08x}")


def _rounded(tag: re.Match[str]) -> str:
    """A tag whose coordinates are cut after a hundredth of a point."""
    return re.sub(r"(\.\d\d)\d+", r"\1", tag[0])


def _with_classes(text: str, prefix: str) -> str:
    """The same figure with one rule for all elements that are drawn alike."""
    styles = Counter(re.findall(r' style="([^"]*)"', text))
    rules = []
    for index, (drawn, times) in enumerate(styles.most_common()):
        if times > 1:
            text = text.replace(f' style="{drawn}"', f' class="{prefix}-{index}"')
            rules.append(f".{prefix}-{index}{{{drawn}}}")
    return text.replace("</style>", f"{''.join(rules)}</style>", 1)
