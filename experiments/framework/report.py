"""The report of a study, a short paper: `report.md` and `report.html`, from the study's folder.

Each experiment's section starts with its finding and the figure that shows it, then explains how it
was measured and how to repeat it; tables are folded away at its end. The HTML page needs no other
file: figures are redrawn from the tables, and follow the reader's light or dark mode.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markdown_it import MarkdownIt
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.console import Console

from experiments import QUESTION, data_of, load_experiments
from experiments.framework.experiment import AnyExperiment, Evidence, Finding
from experiments.framework.intervals import UNITS
from experiments.framework.manifest import read_manifest, write_at_once, write_manifest
from experiments.framework.plots import overview, svg
from experiments.framework.quotable import quotable
from experiments.framework.results import Drawn, Part, drawn, read_parts, readable, write_figures
from experiments.framework.wording import about_seconds
from experiments.loading import short_name

MAX_ROWS = 15
"""Rows of a CSV file that the HTML page shows."""

_WORKS = data_of(Path(__file__).with_name("related.yaml"))
"""Related work: what other publications say, by the anchor of the finding beside it."""

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


def needs(parts: Iterable[Part]) -> list[tuple[Part, Finding]]:
    """The findings of the report's first table: "works" first, then "costs" and "breaks"."""
    found = [(part, finding) for part in parts for finding in part.findings if finding.need]
    return sorted(found, key=lambda row: ("works", "costs", "breaks", None).index(row[1].verdict))


def threats(parts: Iterable[Part]) -> list[Evidence]:
    """The kinds of evidence that findings rest on; the report states a threat for each."""
    kinds = {finding.evidence for part in parts for finding in part.findings}
    return [kind for kind in Evidence if kind in kinds]


def related(parts: Iterable[Part]) -> list[tuple[str, str, str, Finding]]:
    """Related work: the publication, what it says, our finding's anchor, and our finding."""
    return [
        (line["work"], line["says"], part.anchor(finding.name), finding)
        for part in parts
        for finding in part.findings
        for line in _WORKS.get(part.anchor(finding.name), [])
    ]


def _cell(value: Any) -> str:
    if pd.isna(value):
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return str(value)


def _to_html(markdown: str) -> Markup:
    """Markdown as HTML, with each table in a box that scrolls horizontally."""
    box = '<div class="scroll" tabindex="0" role="group" aria-label="Table"><table>'
    html = _MARKDOWN.render(markdown).replace("<table>", box)
    return Markup(html.replace("</table>", "</table></div>"))


def _overview(parts: Iterable[Part], folder: Path) -> dict[str, Figure]:
    """Draw the first figure and write its SVG file; empty if no experiment has a contrast."""
    done = [part for part in parts if not part.error]
    contrasts = [each for part in done for each in part.experiment.contrasts(part.tables)]
    figures = {"overview": overview(contrasts)} if contrasts else {}
    write_figures(figures, folder)
    return figures


def _drawn(parts: Sequence[Part], folder: Path) -> dict[str, Drawn]:
    """What is drawn of each experiment that did not fail, by its name."""
    found = {}
    for part in [part for part in parts if not part.error]:
        with readable(part, folder):
            found[part.experiment.name] = drawn(part.experiment, part.tables)
    return found


def write_report(folder: Path, experiments: Sequence[AnyExperiment]) -> None:
    """Write `report.md` and `report.html` of the study in `folder` into that folder.

    The same folder gives the same bytes.

    Args:
        experiments: all experiments whose results the folder may hold.

    Raises:
        UserError: if `folder` holds no study.
    """
    parts, manifest = read_parts(folder, experiments), read_manifest(folder)
    environment = Environment(
        loader=PackageLoader("experiments.framework"),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        markdown=_to_html,
        inline=lambda markdown: Markup(_MARKDOWN.renderInline(markdown)),
        cell=_cell,
        head=lambda table: table.loc[:, ~table.columns.str.endswith(UNITS)].head(MAX_ROWS),
        duration=about_seconds,
        svg=lambda figure, name: Markup(svg(figure, salt=name)),
    )
    context = {
        "question": QUESTION,
        "run": manifest,
        "model": manifest.model and short_name(manifest.model),
        "parts": parts,
        "figures_of": {name: figures for name, (figures, _) in _drawn(parts, folder).items()},
        "needs": needs(parts),
        "related": related(parts),
        "threats": threats(parts),
        "overview": _overview(parts, folder),
        "quotable": quotable(parts),
        "max_rows": MAX_ROWS,
        "numeric": pd.api.types.is_numeric_dtype,
    }
    for name in ("report.md", "report.html"):
        text = environment.get_template(name).render(context)
        write_at_once(folder / name, text.encode())


def command(
    folder: Annotated[
        Path, typer.Option("--input", help="Folder of the study.", exists=True, file_okay=False)
    ] = Path("study"),
) -> None:
    """Rebuild the figures and the report of a study from its tables, without running anything."""
    with Console(stderr=True).status("drawing the figures and writing the report"):
        _rebuild(folder)
    typer.echo(f"wrote {folder / 'report.md'} and {folder / 'report.html'}")


def _rebuild(folder: Path) -> None:
    experiments, manifest = load_experiments(), read_manifest(folder)
    entries = dict(manifest.experiments)
    for name, (figures, shown) in _drawn(read_parts(folder, experiments), folder).items():
        write_figures(figures, folder)
        entries[name] = entries[name].model_copy(update={"figures": shown})
    write_manifest(manifest.model_copy(update={"experiments": entries}), folder)
    write_report(folder, experiments)
