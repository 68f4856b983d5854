"""`python -m experiments claim NAME`: repeat one finding of the study in about a minute."""

from pathlib import Path
from typing import Annotated

import typer

from experiments import UserError, load_experiments
from experiments.framework.command import measured, progress_bar
from experiments.framework.experiment import AnyExperiment, Finding
from experiments.framework.manifest import read_manifest
from experiments.framework.results import read_parts


def committed(results: Path) -> dict[str, tuple[AnyExperiment, Finding]]:
    """Findings of the study in `results` that can be repeated, by anchor."""
    return {
        part.anchor(finding.name): (part.experiment, finding)
        for part in read_parts(results, load_experiments())
        for finding in part.findings
        if finding.name in part.experiment.claims
    }


def measured_again(experiment: AnyExperiment, name: str) -> Finding:
    """Measure a finding on this machine, with the small grid of its `Claim`."""
    tables = measured(experiment, experiment.claims[name].options, progress_bar())
    (found,) = (finding for finding in experiment.findings(tables) if finding.name == name)
    return found


def command(
    name: Annotated[
        str | None, typer.Argument(help="Name of the finding.", show_default="list them")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("results"),
) -> None:
    """Measure one finding of the study again, on a small grid, and compare the numbers in bold.

    Exits with status 1 if they differ. Other numbers of a finding may depend on the grid, and are
    printed only.
    """
    if model := read_manifest(results).model:
        raise UserError(f"{results} studies {model}; claims are those of the shipped models")
    known = committed(results)
    if name is None:
        for anchor, (_, finding) in known.items():
            typer.echo(f"{anchor}: {finding.text.replace('**', '')}")
        return
    if name not in known:
        listed = ", ".join(known) or "none yet"
        raise UserError(f"{name!r} cannot be measured again; there are: {listed}")
    experiment, there = known[name]
    here, within = measured_again(experiment, there.name), experiment.claims[there.name].within
    agrees = abs(here.number - there.number) <= within + 1e-9
    typer.echo(f"{results}: {there.text}\nhere: {here.text}")
    numbers = f"{here.number:g} here, {there.number:g} in {results}"
    allowed = f"; up to {within:g} apart is agreement" if within else ""
    typer.echo(f"{name} {'agrees' if agrees else 'differs'}: {numbers}{allowed}")
    if not agrees:
        raise typer.Exit(1)
