"""The report of a study: `report.md` and `report.html`, made from the study's folder alone.

The folder holds a CSV file per table, a PNG file per figure, and the manifest `run.json`, which
says what belongs to which experiment. What the tables mean is read off them again each time, so a
report can be rebuilt, in better words or a better layout, without running anything.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markdown_it import MarkdownIt
from markupsafe import Markup
from matplotlib.figure import Figure

from experiments import UserError, load_experiments
from experiments.framework.experiment import Experiment, Tables
from experiments.framework.plots import save

MANIFEST = "run.json"
QUESTION = (
    "To change what a transformer keeps in its KV cache, must you patch its code, or are hooks "
    "enough, and what does each cost?"
)
MAX_ROWS = 400
"""Rows of a table that the HTML page shows; the rest is in the CSV file."""

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


# ---- the folder of a study ---------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What a study's folder holds of one experiment.

    Attributes:
        tables: by name, as read from the CSV files.
        figures: what each shows, in words, by name.
        seconds: that it ran.
        error: why it failed, in one line, or None.
    """

    experiment: Experiment
    tables: Tables
    figures: dict[str, str]
    seconds: float
    error: str | None

    @property
    def summary(self) -> str:
        """What was measured, as Markdown; empty if the experiment failed."""
        return "" if self.error else self.experiment.summary(self.tables)


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write a CSV file that `read_table` reads back as it was."""
    table.to_csv(path, index=False, lineterminator="\n")


def write_results(tables: Tables, figures: Mapping[str, Figure], folder: Path) -> None:
    """Write tables and figures into `folder`, made if absent, under their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write_table(table, folder / f"{name}.csv")
    for name, figure in figures.items():
        save(figure, folder / f"{name}.png")


def read_table(path: Path) -> pd.DataFrame:
    """A table that `write_table` wrote; only an empty cell means that a value is missing."""
    return pd.read_csv(path, keep_default_na=False, na_values=[""], float_precision="round_trip")


def draw(experiment: Experiment, tables: Tables, folder: Path) -> dict[str, str]:
    """Draw the figures of an experiment into `folder`; returns what each shows, by name."""
    figures = experiment.figures(tables)
    for name, figure in figures.items():
        save(figure, folder / f"{name}.png")
    return {name: describe(figure) for name, figure in figures.items()}


def describe(figure: Figure) -> str:
    """What a figure shows, in words: its label (`Figure.set_label`), else its titles and axes."""
    if figure.get_label():
        return str(figure.get_label())
    titles = [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center", "right")]
    vertical = [axes.get_ylabel() for axes in figure.axes]
    horizontal = [axes.get_xlabel() for axes in figure.axes]
    drawn = " against ".join(filter(None, (_listed(vertical), _listed(horizontal))))
    named = _listed([figure.get_suptitle(), *titles])
    return ": ".join(filter(None, (named, drawn)))


def _listed(texts: Iterable[str]) -> str:
    """The texts that say something, each once, in one line."""
    return "; ".join(dict.fromkeys(" ".join(text.split()) for text in texts if text))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the study in `folder`.

    Raises:
        UserError: if there is none, or it cannot be read.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"there is no {MANIFEST} in {folder}, so it holds no study; make one with "
            f"`python -m experiments study --output {folder}`"
        ) from None
    except ValueError as error:
        raise UserError(f"{folder / MANIFEST} is not JSON: {error}") from error
    return manifest


def write_manifest(manifest: dict[str, Any], folder: Path) -> None:
    """Write the manifest of a study into its `folder`."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_parts(folder: Path, experiments: Sequence[Experiment]) -> list[Part]:
    """What a study's folder holds, an experiment each, in the order in which they ran.

    Raises:
        UserError: if `folder` holds no study, or an experiment that is not among `experiments`.
    """
    known = {experiment.name: experiment for experiment in experiments}
    parts = []
    for name, entry in read_manifest(folder)["experiments"].items():
        if name not in known:
            raise UserError(
                f"{folder} holds results of {name!r}, which is not an experiment any more; there "
                f"are {', '.join(known)}; run the study again"
            )
        tables = {table: read_table(folder / f"{table}.csv") for table in entry["tables"]}
        parts.append(Part(known[name], tables, entry["figures"], entry["seconds"], entry["error"]))
    return parts


# ---- text --------------------------------------------------------------------------------------


def headline(markdown: str) -> str:
    """The first paragraph of a summary, in one line of Markdown: the answer in short."""
    tokens = _MARKDOWN.parse(markdown)
    for opening, inline in pairwise(tokens):
        if opening.type == "paragraph_open" and opening.level == 0:
            return " ".join(inline.content.split())
    return ""


def verdict(parts: Iterable[Part]) -> str:
    """Every question with its answer, as a Markdown table."""
    rows = ["| Question | Answer |", "|---|---|"]
    for part in parts:
        cells = part.experiment.question, _answer(part)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _answer(part: Part) -> str:
    return "(The experiment failed.)" if part.error else headline(part.summary)


def _cell(value: Any) -> str:
    if pd.isna(value):
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _to_html(markdown: str) -> Markup:
    """Markdown as HTML, each table in a box of its own in which it can scroll sideways."""
    html = _MARKDOWN.render(markdown)
    box = '<div class="scroll" tabindex="0" role="group" aria-label="Table"><table>'
    html = html.replace("<table>", box)
    return Markup(html.replace("</table>", "</table></div>"))


def _inline(markdown: str) -> Markup:
    return Markup(_MARKDOWN.renderInline(markdown))


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + b64encode(path.read_bytes()).decode()


# ---- the two pages -----------------------------------------------------------------------------


def write_report(folder: Path, experiments: Sequence[Experiment]) -> None:
    """Write `report.md` and `report.html` of the study in `folder`, into it.

    The same folder gives the same bytes. The HTML page needs no other file.

    Args:
        experiments: all that the study may hold results of.

    Raises:
        UserError: if `folder` holds no study.
    """
    parts = read_parts(folder, experiments)
    environment = Environment(
        loader=PackageLoader("experiments"),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(markdown=_to_html, inline=_inline, cell=_cell, duration=_duration)
    context = {
        "question": QUESTION,
        "run": read_manifest(folder),
        "parts": parts,
        "verdict": verdict(parts),
        "answer": _answer,
        "image": lambda name: _data_uri(folder / f"{name}.png"),
        "max_rows": MAX_ROWS,
        "numeric": pd.api.types.is_numeric_dtype,
    }
    for name in ("report.md", "report.html"):
        text = environment.get_template(name).render(context)
        (folder / name).write_text(text, encoding="utf-8")


def command(
    folder: Annotated[
        Path, typer.Option("--input", help="Folder of the study.", exists=True, file_okay=False)
    ] = Path("study"),
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw the figures again too.")] = False,
) -> None:
    """Rebuild report.md and report.html from the tables of a study, without running anything."""
    experiments = load_experiments()
    if redraw:
        manifest = read_manifest(folder)
        for part in read_parts(folder, experiments):
            if not part.error:
                entry = manifest["experiments"][part.experiment.name]
                entry["figures"] = draw(part.experiment, part.tables, folder)
        write_manifest(manifest, folder)
    write_report(folder, experiments)
    typer.echo(f"wrote {folder / 'report.md'} and {folder / 'report.html'}")
