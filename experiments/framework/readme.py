"""Insert the committed results into the README and the pages of `docs/`.

A block of a page starts with a line `<!-- table: quality-best overhead-decode -->` and ends with a
line `<!-- /table -->`; it holds the findings with these anchors. `<!-- table: architectures -->`
holds the tables of an experiment, and `<!-- table: answers -->` all questions of the study, each
with its findings, one figure, and a link to the tables in the report.
`python -m experiments readme` writes the blocks; never edit them by hand.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from experiments import UserError, load_experiments
from experiments.framework.experiment import AnyExperiment, Finding
from experiments.framework.manifest import check_one_run, read_manifest, write_at_once
from experiments.framework.results import Part, read_parts

_BLOCK = re.compile(r"^<!-- table: ([^\n]+) -->$.*?^<!-- /table -->$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"^<!-- (?:table: .+|/table) -->$", re.MULTILINE)


def blocks(results: Path, experiments: Sequence[AnyExperiment]) -> dict[str, str]:
    """The contents that pages can show of the study in `results`: Markdown by block name.

    Raises:
        UserError: if the folder holds no study, or one in which an experiment failed.
    """
    parts = read_parts(results, experiments)
    failed = [part.experiment.name for part in parts if part.error]
    if failed:
        raise UserError(f"{', '.join(failed)} failed in the study in {results}; run it again")
    items = {part.anchor(each.name): _item(each) for part in parts for each in part.findings}
    items |= {part.experiment.name: _tables(part) for part in parts}
    answers = [_answer(part, f"../{results.name}") for part in parts]
    return {"answers": "\n\n".join(answers), **items}


def _answer(part: Part, folder: str) -> str:
    """A question, which links to the report, with its evidence, findings and first figure."""
    title, name, usual = part.experiment.title, part.experiment.name, part.experiment.evidence
    kind = [f"*{usual.value.capitalize()}:*"] if usual else []
    own = (replace(x, evidence=None) if x.evidence is usual else x for x in part.findings)
    findings = "\n".join(map(_item, own))
    shown = [f"![{title}]({folder}/{figure}.svg)" for figure in part.entry.figures]
    return "\n\n".join([f"## [{title}]({folder}/report.html#{name})", *kind, findings, *shown[:1]])


def _tables(part: Part) -> str:
    """The tables of an experiment for readers."""
    return "\n\n".join(view.markdown() for view in part.experiment.views(part.tables))


def _item(finding: Finding) -> str:
    return f"- {finding.text}" + (f" *({finding.basis})*" if finding.basis else "")


def fill(text: str, contents: Mapping[str, str]) -> str:
    """Fill the blocks of a page.

    Raises:
        UserError: if the markers do not match, or name an unknown block.
    """

    def filled(block: re.Match[str]) -> str:
        if unknown := [name for name in block[1].split() if name not in contents]:
            raise UserError(f"no table is called {unknown[0]!r}; there are {', '.join(contents)}")
        shown = "\n".join(contents[name].strip() for name in block[1].split())
        return f"<!-- table: {block[1]} -->\n\n{shown}\n\n<!-- /table -->"

    new, count = _BLOCK.subn(filled, text)
    if len(markers := _MARKER.findall(text)) != 2 * count:
        raise UserError(f"blocks are not opened and closed in turn: {' '.join(markers)}")
    return new


def command(
    results: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("results"),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if a block is out of date.")
    ] = False,
) -> None:
    """Update the tables in the README and in docs/ from the committed results."""
    experiments = load_experiments()
    run = read_manifest(results)
    if check and not run.quick:
        check_one_run(results, run, {each.name: repr(each.full) for each in experiments})
    contents, stale = blocks(results, experiments), False
    for page in (Path("README.md"), *sorted(Path("docs").rglob("*.md"))):
        old = page.read_text(encoding="utf-8")
        new = fill(old, contents)
        if new != old and check:
            stale = True
            typer.echo(f"{page} does not show what {results} holds", err=True)
        elif new != old:
            write_at_once(page, new.encode())
            typer.echo(f"{page} rewritten")
    if stale:
        typer.echo("run `python -m experiments readme`", err=True)
        raise typer.Exit(1)
