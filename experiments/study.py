"""All experiments, one after the other, into one folder: tables, figures, manifest and report."""

from __future__ import annotations

import os
import platform
import subprocess
import traceback
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments import UserError, load_experiments
from experiments.framework.command import SEED, measured, progress_bar
from experiments.framework.experiment import AnyExperiment
from experiments.framework.report import write_report
from experiments.framework.results import (
    MANIFEST,
    draw,
    read_manifest,
    read_table,
    write_manifest,
    write_table,
)


def run_study(
    experiments: Sequence[AnyExperiment],
    output: Path,
    console: Console,
    only: Sequence[str] = (),
    *,
    full: bool = False,
) -> list[str]:
    """Run `experiments` in order and write everything into `output`.

    An experiment that fails takes nothing from the others; the report says that it did. Files of
    an earlier study in the same folder, as named by its manifest, are removed first.

    Args:
        output: folder for the CSV and PNG files, `run.json`, `report.md` and `report.html`; made
            if absent.
        console: where progress and tracebacks go.
        only: names of the experiments to run, empty for all; what the folder holds of the others
            stays.
        full: with the options of the committed results, not the quick ones.

    Returns:
        Names of the experiments that failed.

    Raises:
        UserError: if a name is not known, or if the folder holds files of somebody else.
    """
    _refuse_foreign(output)
    former = _kept_entries(experiments, output, only)
    chosen = [experiment for experiment in experiments if not only or experiment.name in only]
    output.mkdir(parents=True, exist_ok=True)
    _remove_former(output, keep=former)
    entries: dict[str, dict[str, Any]] = {e.name: former.get(e.name, {}) for e in experiments}
    entries = {name: entry for name, entry in entries.items() if entry}
    environment = environment_info()
    manifest = environment | {"experiments": entries}
    for number, experiment in enumerate(chosen, 1):
        # Plain lines: experiments draw progress bars of their own.
        console.rule(f"{number} of {len(chosen)}: {experiment.title}", align="left")
        options = experiment.full if full else experiment.quick
        entry: dict[str, Any] = {"seconds": 0.0, "error": None, "tables": [], "figures": {}}
        entry |= {"commit": environment["commit"], "repeat": _repeat(experiment, options)}
        start = perf_counter()
        try:
            taken = [table for other in entries.values() for table in other["tables"]]
            _run(experiment, options, output, entry, taken)
        except Exception as error:
            entry["error"] = " ".join(f"{type(error).__name__}: {error}".split())
            console.print(traceback.format_exc(), markup=False, highlight=False)
        entry["seconds"] = round(perf_counter() - start, 2)
        entries[experiment.name] = entry
        write_manifest(manifest, output)  # what is done survives an interrupt
        console.print(f"{'failed' if entry['error'] else 'done'} in {entry['seconds']:.1f} s")
    done = [experiment for experiment in experiments if experiment.name in entries]
    manifest["experiments"] = {e.name: entries[e.name] for e in done}
    write_manifest(manifest, output)
    write_report(output, done)
    return [name for name, entry in entries.items() if entry["error"]]


def _repeat(experiment: AnyExperiment, options: Any) -> str:
    """The command that runs an experiment again as it was run here."""
    if options == experiment.full:
        return f"python -m experiments {experiment.name}"
    return f"python -m experiments study --only {experiment.name}"


def _run(
    experiment: AnyExperiment,
    options: Any,
    output: Path,
    entry: dict[str, Any],
    taken: list[str],
) -> None:
    """Measure, and note in `entry` what was written, so that a failure keeps what there is."""
    tables = measured(experiment, options, progress_bar())
    for name, table in tables.items():
        if name in taken:
            raise ValueError(f"a table {name!r} was written by an experiment before this one")
        write_table(table, output / f"{name}.csv")
        entry["tables"].append(name)
    # From here on as whoever rebuilds the report will: from the files.
    tables = {name: read_table(output / f"{name}.csv") for name in tables}
    entry["figures"] = draw(experiment, tables, output)
    experiment.markdown(tables)


def _kept_entries(
    experiments: Sequence[AnyExperiment], output: Path, only: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """What the manifest in `output` says of the experiments that are not run again."""
    known = [experiment.name for experiment in experiments]
    for name in only:
        if name not in known:
            raise UserError(f"no experiment is called {name!r}; there are {', '.join(known)}")
    if not only or not (output / MANIFEST).exists():
        return {}
    entries = read_manifest(output)["experiments"]
    return {name: entries[name] for name in known if name in entries and name not in only}


def _refuse_foreign(output: Path) -> None:
    """Refuse a folder with files that a study might write over, and that no study has written."""
    if (output / MANIFEST).exists() or not output.is_dir():
        return
    kinds = ("*.csv", "*.png", "report.md", "report.html")
    foreign = sorted(path.name for kind in kinds for path in output.glob(kind))
    if foreign:
        raise UserError(
            f"{output} has no {MANIFEST}, and a file {foreign[0]} that no study has written and "
            "that might be lost; give another --output"
        )


def _remove_former(output: Path, keep: Collection[str]) -> None:
    if not (output / MANIFEST).exists():
        return
    for name, entry in read_manifest(output)["experiments"].items():
        if name in keep:
            continue
        for table in entry["tables"]:
            (output / f"{table}.csv").unlink(missing_ok=True)
        for figure in entry["figures"]:
            (output / f"{figure}.png").unlink(missing_ok=True)


def environment_info() -> dict[str, Any]:
    """When, with what and on what a study is run."""
    libraries = ("torch", "transformers", "wrapt", "pandas")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "seed": SEED,
        "versions": {"python": platform.python_version()}
        | {library: version(library) for library in libraries},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu_count": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": gpu,
        },
    }


def _commit() -> str | None:
    """The git commit of this code, "+changes" if Python files differ from it, None if unknown."""
    here = Path(__file__)

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(here.parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        if git("ls-files", "--error-unmatch", here.name).returncode:
            return None  # installed somewhere, perhaps inside of another repository
        commit = git("rev-parse", "HEAD").stdout.strip()
        changed = git("diff", "--quiet", "HEAD", "--", ":/*.py").returncode
    except OSError:
        return None
    return f"{commit}+changes" if changed else commit


def _outcome(output: Path) -> Table:
    table = Table(title=f"study in {output}", title_justify="left")
    table.add_column("experiment")
    table.add_column("seconds", justify="right")
    table.add_column("outcome")
    for name, entry in read_manifest(output)["experiments"].items():
        outcome = (
            entry["error"] or f"{len(entry['tables'])} tables, {len(entry['figures'])} figures"
        )
        table.add_row(name, f"{entry['seconds']:.1f}", Text(outcome))
    return table


def command(
    output: Annotated[
        Path, typer.Option(help="Folder to write to; `results` for the committed results.")
    ] = Path("study"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Experiment to run; what the folder holds of the others stays. Repeatable.",
            show_default="all",
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="The grids of the committed results, for which it takes a quarter hour."
        ),
    ] = False,
) -> None:
    """Run all experiments and write tables, figures and the report into one folder.

    Grids are small, for a first look within minutes; --full has those of the committed results.
    Open report.html in the folder afterwards. The exit status is 1 if an experiment failed; the
    report then holds the results of the others.
    """
    failed = run_study(load_experiments(), output, Console(stderr=True), only or (), full=full)
    Console().print(_outcome(output))
    typer.echo(f"report: {output / 'report.html'}")
    if failed:
        raise typer.Exit(1)
