"""The README's tables, taken from the committed results.

A block of the README between a line `<!-- table: quality -->` and a line `<!-- /table -->` holds
what the experiment of that name has to say; the name `verdict` stands for all questions with their
answers. Blocks are written by `python -m experiments readme`, never by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments import UserError, load_experiments
from experiments.framework.experiment import AnyExperiment
from experiments.framework.report import verdict
from experiments.framework.results import read_parts

_OPENING = re.compile(r"<!-- table: (\S+) -->")
_CLOSING = "<!-- /table -->"


def blocks(results: Path, experiments: Sequence[AnyExperiment]) -> dict[str, str]:
    """What a README can show of the study in the folder `results`: Markdown by block name.

    Raises:
        UserError: if the folder holds no study, or one in which an experiment failed.
    """
    parts = read_parts(results, experiments)
    failed = [part.experiment.name for part in parts if part.error]
    if failed:
        raise UserError(f"{', '.join(failed)} failed in the study in {results}; run it again")
    contents = {part.experiment.name: part.experiment.markdown(part.tables) for part in parts}
    return {"verdict": verdict(parts)} | contents


def markers(text: str) -> list[str]:
    """Names of the blocks of a README, in order.

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
            names.append(opening[1])
            opened = number
        elif line.strip() == _CLOSING:
            if opened is None:
                raise UserError(f"line {number}: {_CLOSING} closes a block that nothing opens")
            opened = None
    if opened is not None:
        raise UserError(f"line {opened}: the block opened here lacks its {_CLOSING}")
    return names


def fill(text: str, contents: Mapping[str, str]) -> tuple[str, list[str]]:
    """A README with its blocks filled.

    Returns:
        The new text, and the names of the blocks that were not as they should be.

    Raises:
        UserError: if the markers do not match, or name something that there is not.
    """
    unknown = [name for name in markers(text) if name not in contents]
    if unknown:
        raise UserError(f"no table is called {unknown[0]!r}; there are {', '.join(contents)}")
    stale = []

    def renewed(block: re.Match[str]) -> str:
        name = block["name"]
        content = f"{block['opening']}\n\n{contents[name].strip()}\n\n{_CLOSING}"
        if content != block[0]:
            stale.append(name)
        return content

    return _BLOCK.sub(renewed, text), stale


_BLOCK = re.compile(
    rf"^(?P<opening>[ \t]*<!-- table: (?P<name>\S+) -->)[ \t]*\n.*?^[ \t]*{_CLOSING}",
    re.DOTALL | re.MULTILINE,
)


def command(
    readme: Annotated[Path, typer.Option(help="The README.", exists=True, dir_okay=False)] = Path(
        "README.md"
    ),
    results: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("results"),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if a block is out of date.")
    ] = False,
) -> None:
    """Rewrite the README's tables from the committed results."""
    text = readme.read_text(encoding="utf-8")
    if not markers(text):
        typer.echo(f"{readme} has no tables")
        return
    new, stale = fill(text, blocks(results, load_experiments()))
    if stale and check:
        typer.echo(
            f"{readme} does not show what {results} holds: {', '.join(stale)}; "
            "run `python -m experiments readme`",
            err=True,
        )
        raise typer.Exit(1)
    if stale:
        readme.write_text(new, encoding="utf-8")
    typer.echo(f"{readme}: {', '.join(stale)} rewritten" if stale else f"{readme} is up to date")
