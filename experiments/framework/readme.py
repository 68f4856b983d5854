"""What the README and the pages of `docs/` say of the committed results.

A block of a page between a line `<!-- table: quality -->` and a line `<!-- /table -->` holds what
the experiment of that name has to say, one of `<!-- table: quality-best overhead-decode -->` single
findings by their anchors in the report. `verdict` stands for all questions with their answers,
`needs` for all needs with what was found, `related` for what others say beside it, `quotable` for
all presses with what was measured of each. Blocks are written by `python -m experiments readme`,
never by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments import UserError, load_experiments
from experiments.framework.experiment import AnyExperiment
from experiments.framework.quotable import quotable
from experiments.framework.report import needs, related, verdict
from experiments.framework.results import Part, read_parts
from experiments.framework.tables import markdown_table

PAGES = Path("README.md"), Path("docs")
"""Pages that may hold blocks, and folders of such."""

_OPENING = re.compile(r"<!-- table: (\S+(?: \S+)*) -->")
_CLOSING = "<!-- /table -->"


def blocks(results: Path, experiments: Sequence[AnyExperiment]) -> dict[str, str]:
    """What a page can show of the study in the folder `results`: Markdown by block name.

    Raises:
        UserError: if the folder holds no study, or one in which an experiment failed.
    """
    parts = read_parts(results, experiments)
    failed = [part.experiment.name for part in parts if part.error]
    if failed:
        raise UserError(f"{', '.join(failed)} failed in the study in {results}; run it again")
    contents = {part.experiment.name: part.experiment.markdown(part.tables) for part in parts}
    whole = {"verdict": verdict(parts), "needs": _needs(parts), "related": _related(parts)}
    if quoted := quotable(parts):
        whole["quotable"] = quoted.markdown()
    return whole | contents | dict(_findings(parts))


def _needs(parts: Sequence[Part]) -> str:
    rows = [[need, came_to, text] for need, came_to, text, _ in needs(parts)]
    return markdown_table(["To ...", "Verdict", "Finding"], rows, left=None)


def _related(parts: Sequence[Part]) -> str:
    rows = [[work, says, here] for _, work, says, here in related(parts)]
    return markdown_table(["Work", "says", "here"], rows, left=None)


def _findings(parts: Sequence[Part]) -> Iterator[tuple[str, str]]:
    """Each finding, an item of a list, by its anchor in the report."""
    for part in parts:
        for finding in part.findings:
            yield f"{part.experiment.name}-{finding.name}", f"- {finding.text}"


def markers(text: str) -> list[str]:
    """Names of what the blocks of a page show, in order.

    Raises:
        UserError: if a block is not closed, or closed without having been opened.
    """
    names: list[str] = []
    opened: int | None = None
    for number, line in enumerate(text.splitlines(), 1):
        opening = _OPENING.fullmatch(line.strip())
        if opening and opened is not None:
            raise UserError(f"line {number}: {line} inside the block that line {opened} opens")
        if opening:
            names += opening[1].split()
            opened = number
        elif line.strip() == _CLOSING:
            if opened is None:
                raise UserError(f"line {number}: {_CLOSING} closes a block that nothing opens")
            opened = None
    if opened is not None:
        raise UserError(f"line {opened}: the block opened here lacks its {_CLOSING}")
    return names


def fill(text: str, contents: Mapping[str, str]) -> tuple[str, list[str]]:
    """A page with its blocks filled.

    Returns:
        The new text, and the names of what was not shown as it should be.

    Raises:
        UserError: if the markers do not match, or name something that there is not.
    """
    unknown = [name for name in markers(text) if name not in contents]
    if unknown:
        raise UserError(f"no table is called {unknown[0]!r}; there are {', '.join(contents)}")
    stale: list[str] = []

    def renewed(block: re.Match[str]) -> str:
        names = block["names"].split()
        shown = "\n".join(contents[name].strip() for name in names)
        content = f"{block['opening']}\n\n{shown}\n\n{_CLOSING}"
        if content != block[0]:
            stale.extend(names)
        return content

    return _BLOCK.sub(renewed, text), stale


_BLOCK = re.compile(
    rf"^(?P<opening>[ \t]*<!-- table: (?P<names>\S+(?: \S+)*) -->)[ \t]*\n.*?^[ \t]*{_CLOSING}",
    re.DOTALL | re.MULTILINE,
)


def pages(paths: Sequence[Path]) -> list[Path]:
    """The pages among `paths` and in the folders among them that have blocks.

    Raises:
        UserError: if there is no such file or folder.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise UserError(f"there is no {missing[0]}; run this where the README is, or give --page")
    files = (sorted(path.rglob("*.md")) if path.is_dir() else [path] for path in paths)
    return [page for found in files for page in found if markers(page.read_text(encoding="utf-8"))]


def command(
    page: Annotated[
        list[Path] | None,
        typer.Option(help="Page, or folder of pages.", show_default="README.md and docs"),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("results"),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if a block is out of date.")
    ] = False,
) -> None:
    """Rewrite the tables of the README and of docs/ from the committed results."""
    found = pages(page or PAGES)
    contents = blocks(results, load_experiments()) if found else {}
    any_stale = False
    for path in found:
        new, stale = fill(path.read_text(encoding="utf-8"), contents)
        any_stale |= bool(stale)
        if not stale:
            typer.echo(f"{path} is up to date")
        elif check:
            typer.echo(f"{path} does not show what {results} holds: {', '.join(stale)}", err=True)
        else:
            path.write_text(new, encoding="utf-8")
            typer.echo(f"{path}: {', '.join(stale)} rewritten")
    if any_stale and check:
        typer.echo("run `python -m experiments readme`", err=True)
        raise typer.Exit(1)
