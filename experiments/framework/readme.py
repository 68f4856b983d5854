"""What the README and the pages of `docs/` say of the committed results.

A block of a page between a line `<!-- table: quality-best overhead-decode -->` and a line
`<!-- /table -->` holds findings, by their anchors in the report. `<!-- table: answers -->` holds
all questions of the study: the findings, one figure, and a link to the tables in the report.
Blocks are written by `python -m experiments readme`, never by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments import UserError, load_experiments
from experiments.framework.experiment import AnyExperiment, Finding
from experiments.framework.manifest import disagreements, read_manifest
from experiments.framework.results import Part, read_parts

PAGES = Path("README.md"), Path("docs")
"""Pages that may hold blocks, and folders of such."""

CITATION = Path("CITATION.cff")

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
    items = {part.anchor(each.name): _item(each) for part in parts for each in part.findings}
    answers = [_answer(part, f"../{results.name}") for part in parts]
    return {"answers": "\n\n".join(answers), **items}


def _answer(part: Part, folder: str) -> str:
    """A question with its findings, the first figure, and where the rest is."""
    shown = [f"![{shows}]({folder}/{name}.svg)" for name, shows in part.entry.figures.items()]
    findings = "\n".join(_item(finding) for finding in part.findings)
    more = f"[Method, tables and figures]({folder}/report.html#{part.experiment.name})"
    return "\n\n".join([f"## {part.experiment.title}", findings, *shown[:1], more])


def _item(finding: Finding) -> str:
    return f"- {finding.text}" + (f" *({finding.evidence.value})*" if finding.evidence else "")


def fill(text: str, contents: Mapping[str, str]) -> tuple[str, list[str]]:
    """A page with its blocks filled.

    Returns:
        The new text, and the names of what was not shown as it should be.

    Raises:
        UserError: if the markers do not match, or name something that there is not.
    """
    filled: list[str] = []
    stale: list[str] = []
    names: list[str] = []
    opened, start = 0, 0  # the line that opens the block, and where it is in `filled`
    for number, line in enumerate(text.split("\n"), 1):
        opening, closes = _OPENING.fullmatch(line.strip()), line.strip() == _CLOSING
        if opening and opened:
            raise UserError(f"line {number}: {line} inside the block that line {opened} opens")
        if closes and not opened:
            raise UserError(f"line {number}: {_CLOSING} closes a block that nothing opens")
        if opening:
            names, opened, start = opening[1].split(), number, len(filled) + 1
            if unknown := [name for name in names if name not in contents]:
                known = ", ".join(contents)
                raise UserError(f"no table is called {unknown[0]!r}; there are {known}")
        if closes:
            shown = "\n".join(contents[name].strip() for name in names)
            if filled[start:] != (due := ["", *shown.split("\n"), ""]):
                stale += names
            filled[start:] = due
            opened = 0
        filled.append(line)
    if opened:
        raise UserError(f"line {opened}: the block opened here lacks its {_CLOSING}")
    return "\n".join(filled), stale


def pages(paths: Sequence[Path]) -> list[Path]:
    """The pages among `paths` and in the folders among them that have blocks.

    Raises:
        UserError: if there is no such file or folder.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise UserError(f"there is no {missing[0]}; run this where the README is, or give --page")
    files = (sorted(path.rglob("*.md")) if path.is_dir() else [path] for path in paths)
    marks = ("<!-- table: ", _CLOSING)
    return [
        page
        for found in files
        for page in found
        if any(mark in page.read_text(encoding="utf-8") for mark in marks)
    ]


def cited(text: str, results: Path) -> str:
    """A `CITATION.cff` that names the date and the commit of the study in `results`."""
    run = read_manifest(results)
    for key, value in (("date-released", run.date[:10]), ("commit", run.commit)):
        text = re.sub(rf"^( +{key}: ).*", rf"\g<1>{value}", text, flags=re.MULTILINE)
    return text


def _check_one_run(results: Path, experiments: Sequence[AnyExperiment]) -> None:
    """See that a whole study comes from one run of one commit.

    Raises:
        UserError: if it does not; a quick study may.
    """
    run = read_manifest(results)
    options = {experiment.name: repr(experiment.full) for experiment in experiments}
    if not run.quick and (told := list(disagreements(results, run, options))):
        raise UserError(f"{results} is not from one run: {'; '.join(told)}; run `make results`")


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
    """Rewrite the tables of the README and of docs/, and CITATION.cff, from committed results."""
    found, experiments = pages(page or PAGES), load_experiments()
    if check and found:
        _check_one_run(results, experiments)
    contents = blocks(results, experiments) if found else {}
    updates = [(path, *fill(path.read_text(encoding="utf-8"), contents)) for path in found]
    if page is None and CITATION.exists():
        old = CITATION.read_text(encoding="utf-8")
        new = cited(old, results)
        updates.append((CITATION, new, ["references"] if new != old else []))
    any_stale = False
    for path, new, stale in updates:
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
