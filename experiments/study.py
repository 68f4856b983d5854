"""All experiments, one after the other, into one folder: tables, figures, manifest and report.

The study of this project runs on the shipped models and on small ones with random weights. With
`--model` what makes sense on a model of the user's own runs on that: each experiment says itself
what (`Experiment.on`).
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments import UserError, load_experiments
from experiments.framework.command import SEED, measured, progress_bar
from experiments.framework.experiment import AnyExperiment
from experiments.framework.manifest import (
    MANIFEST,
    Entry,
    Manifest,
    check_names,
    check_output,
    read_manifest,
    write_manifest,
)
from experiments.framework.options import Device, Dtype
from experiments.framework.own_model import LeftOutError, OwnModel, Planned
from experiments.framework.report import write_report
from experiments.framework.results import describe, read_table, write_figures, write_table
from experiments.testbed.getting_to_know import full_name, get_to_know

UNFINISHED = "it was interrupted before everything was written"
"""The error of an experiment whose files are being written."""


class Task(NamedTuple):
    """An experiment with what it runs with.

    Attributes:
        duration: seconds that it will take, about; None if that is not known.
        note: what a reader of the results has to know besides; empty: nothing.
    """

    experiment: AnyExperiment
    options: Any
    duration: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return self.experiment.name


class Plan(NamedTuple):
    """What a study runs.

    Attributes:
        tasks: in order.
        model: of the user's own, as it was given; None: the study of this project.
        flags: how that model is loaded, as in a command.
        left_out: why an experiment is not run on that model, by its name.
        quick: whether grids are small.
    """

    tasks: list[Task]
    model: str | None = None
    flags: str = ""
    left_out: Mapping[str, str] = {}
    quick: bool = True

    def repeat(self, task: Task) -> str:
        """The command that runs a task again as it is run here."""
        if self.model is not None:
            model = shlex.quote(self.model)
            return f"python -m experiments study --model {model}{self.flags} --only {task.name}"
        if task.options == task.experiment.full:
            return f"python -m experiments {task.name}"
        return f"python -m experiments study --only {task.name}"


def plan_study(
    experiments: Sequence[AnyExperiment], only: Sequence[str] = (), *, full: bool = False
) -> Plan:
    """The study of this project.

    Args:
        only: names of the experiments to run, empty for all.
        full: with the options of the committed results, not the quick ones.

    Raises:
        UserError: if a name is not known.
    """
    chosen = _chosen(experiments, only)
    tasks = [Task(each, each.full if full else each.quick) for each in chosen]
    return Plan(tasks, quick=not full)


def plan_on(own: OwnModel, experiments: Sequence[AnyExperiment], only: Sequence[str] = ()) -> Plan:
    """The study of a model of the user's own.

    Raises:
        UserError: if a name is not known, or one that was asked for is left out.
    """
    tasks, left_out = [], {}
    for experiment in _chosen(experiments, only):
        try:
            planned: Planned[Any] = experiment.on(own)
        except LeftOutError as reason:
            left_out[experiment.name] = str(reason)
        else:
            tasks.append(Task(experiment, planned.options, planned.duration(own), planned.note))
    if only and left_out:
        said = "; ".join(f"{name} is left out: {reason}" for name, reason in left_out.items())
        raise UserError(f"on {own.name} {said}")
    return Plan(tasks, own.model, own.flags, left_out)


def _chosen(experiments: Sequence[AnyExperiment], only: Sequence[str]) -> list[AnyExperiment]:
    known = [experiment.name for experiment in experiments]
    for name in only:
        if name not in known:
            raise UserError(f"no experiment is called {name!r}; there are {', '.join(known)}")
    return [experiment for experiment in experiments if not only or experiment.name in only]


# ---- running -------------------------------------------------------------------------------------


def run_study(
    experiments: Sequence[AnyExperiment],
    output: Path,
    console: Console,
    only: Sequence[str] = (),
    *,
    full: bool = False,
) -> list[str]:
    """Plan the study of this project and run it: see `plan_study` and `run_plan`."""
    plan = plan_study(experiments, only, full=full)
    return run_plan(plan, experiments, output, console, adding=bool(only))


def run_plan(
    plan: Plan,
    experiments: Sequence[AnyExperiment],
    output: Path,
    console: Console,
    *,
    adding: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Run the tasks of `plan` in order and write everything into `output`.

    An experiment that fails takes nothing from the others; the report says that it did. What the
    same study has finished in that folder before it was interrupted is not run again. Files of a
    study that was finished, as named by its manifest, are removed first.

    Args:
        experiments: all that there are, in the order of the report.
        output: folder for the CSV and SVG files, `run.json`, `report.md` and `report.html`; made
            if absent.
        console: where progress and tracebacks go.
        adding: whether what the folder holds of other experiments stays.
        overwrite: whether files that no study has written there may be replaced.

    Returns:
        Names of the experiments that failed.

    Raises:
        UserError: if the folder cannot be written to, or holds something else.
    """
    environment = environment_info()
    names = [task.name for task in plan.tasks]
    former = former_study(output, plan.model, names, overwrite=overwrite)
    entries, tasks = _still_to_run(plan, former, environment, adding)
    if len(tasks) < len(names):
        console.print(
            f"{len(names) - len(tasks)} of {len(names)} experiments were finished before an "
            f"interrupt, and are in {output}; for a study from the start give another --output"
        )
    for file in sorted(_files(former.experiments) - _files(entries) if former else ()):
        (output / file).unlink(missing_ok=True)
    begun = _begun(plan, environment, former if adding else None)

    def save(unfinished: Sequence[Task]) -> None:
        """Write down what is done, so that it survives an interrupt."""
        others = [name for name in begun.waiting if name not in names]
        waiting = [*others, *(task.name for task in unfinished)]
        done = {each.name: entries[each.name] for each in experiments if each.name in entries}
        changed = {"experiments": done, "waiting": waiting}
        write_manifest(begun.model_copy(update=changed), output)

    save(tasks)
    for number, task in enumerate(tasks, 1):
        # Plain lines: experiments draw progress bars of their own.
        console.rule(f"{number} of {len(tasks)}: {task.experiment.title}", align="left")
        repeat, options = plan.repeat(task), repr(task.options)
        started = Entry(
            commit=_commit(),
            versions=begun.versions,
            repeat=repeat,
            options=options,
            note=task.note,
        )
        for entry in _run(task, started, output, console):
            entries[task.name] = entry
            save(tasks[number - 1 :])
        save(tasks[number:])
        console.print(f"{'failed' if entry.error else 'done'} in {entry.seconds:.1f} s")
    write_report(output, experiments)
    return [name for name, entry in entries.items() if entry.error]


def _run(task: Task, entry: Entry, output: Path, console: Console) -> Iterator[Entry]:
    """Measure and write; yields what to note before each part of it is written, and in the end."""
    start, experiment = perf_counter(), task.experiment
    try:
        tables = measured(experiment, task.options, progress_bar())
        check_names(experiment.name, tables)
        entry = entry.model_copy(update={"tables": list(tables), "error": UNFINISHED})
        yield entry
        for name, table in tables.items():
            write_table(table, output / f"{name}.csv")
        # From here on as whoever rebuilds the report will: from the files.
        tables = {name: read_table(output / f"{name}.csv") for name in tables}
        figures = experiment.figures(tables)
        check_names(experiment.name, figures)
        shown = {name: describe(figure) for name, figure in figures.items()}
        entry = entry.model_copy(update={"figures": shown})
        yield entry
        write_figures(figures, output)
        experiment.markdown(tables)
        error = None
    except Exception as failure:
        error = " ".join(f"{type(failure).__name__}: {failure}".split())
        console.print(traceback.format_exc(), markup=False, highlight=False)
    seconds = round(perf_counter() - start, 2)
    yield entry.model_copy(update={"error": error, "seconds": seconds})


def former_study(
    output: Path, model: str | None, names: Collection[str], *, overwrite: bool = False
) -> Manifest | None:
    """What an earlier study has left in the folder, once it is sure that one can be written there.

    Args:
        model: that will be studied; None: the study of this project.
        names: of the experiments that will write.
        overwrite: whether files that no study has written there may be replaced.

    Raises:
        UserError: if the folder cannot be written to, or holds a study of another model, or files
            that would be lost.
    """
    former = None
    if (output / MANIFEST).exists():
        try:
            former = read_manifest(output)
        except UserError:
            if not overwrite:
                raise
    if former and former.model != model:
        raise UserError(
            f"{output} holds a study of {former.model or 'the shipped models'}, not of "
            f"{model or 'those'}; give another --output"
        )
    own = former.files if former else ()
    check_output(output, names, own=own, overwrite=overwrite)
    return former


def _still_to_run(
    plan: Plan, former: Manifest | None, environment: Mapping[str, Any], adding: bool
) -> tuple[dict[str, Entry], list[Task]]:
    """What stays of an earlier study, and the tasks that are to be run."""
    if former is None:
        return {}, plan.tasks
    if adding:
        names = {task.name for task in plan.tasks}
        others = {name: e for name, e in former.experiments.items() if name not in names}
        return others, plan.tasks
    alike = all(getattr(former, what) == environment[what] for what in _SAME)
    if not (former.waiting and alike):
        return {}, plan.tasks
    finished = {
        task.name: entry
        for task in plan.tasks
        if (entry := former.experiments.get(task.name))
        and entry.error is None
        and entry.options == repr(task.options)
        and entry.commit == environment["commit"]
        and entry.versions == environment["versions"]
    }
    return finished, [task for task in plan.tasks if task.name not in finished]


_SAME = ("seed", "versions")
"""What an interrupted study has to have in common with one that goes on with it."""


def _files(entries: Mapping[str, Entry]) -> set[str]:
    return {file for entry in entries.values() for file in entry.files}


def _begun(plan: Plan, environment: Mapping[str, Any], added_to: Manifest | None) -> Manifest:
    """The manifest of a study of which nothing is done yet."""
    names = [task.name for task in plan.tasks]
    others = {n: why for n, why in added_to.left_out.items() if n not in names} if added_to else {}
    return Manifest(
        **environment,
        model=plan.model,
        quick=added_to.quick if added_to else plan.quick,
        left_out={**others, **plan.left_out},
        waiting=added_to.waiting if added_to else [],
        experiments={},
    )


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


# ---- command -------------------------------------------------------------------------------------


def _announcement(plan: Plan, own: OwnModel) -> Table:
    """What will be run on a model of the user's own, how long that takes, and what is left out."""
    known = [task.duration for task in plan.tasks if task.duration is not None]
    title = (
        f"{own.name} ({own.parameters / 1e6:,.1f} M parameters in {own.dtype} on {own.device}: "
        f"{1 / own.token_seconds:,.0f} tokens a second in a prefill, "
        f"{1 / own.step_seconds:,.1f} while decoding) will take about {_about(sum(known))}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("experiment", "takes about", ""):
        table.add_column(name)
    for task in plan.tasks:
        said = " ".join(filter(None, (task.experiment.question, task.note)))
        table.add_row(task.name, _about(task.duration), Text(said))
    for name, reason in plan.left_out.items():
        table.add_row(name, "left out", Text(reason))
    return table


def _about(seconds: float | None) -> str:
    if seconds is None:
        return "not known"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _outcome(output: Path) -> Table:
    table = Table(title=f"study in {output}", title_justify="left")
    table.add_column("experiment")
    table.add_column("seconds", justify="right")
    table.add_column("outcome")
    for name, entry in read_manifest(output).experiments.items():
        outcome = entry.error or f"{len(entry.tables)} tables, {len(entry.figures)} figures"
        table.add_row(name, f"{entry.seconds:.1f}", Text(outcome))
    return table


def command(
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write to; `results` for the committed results.",
            show_default="study, or study-NAME with --model",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Experiment to run; what the folder holds of the others stays. Repeatable.",
            show_default="all",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model of your own to study: a folder that save_pretrained wrote, with its "
            "tokenizer, or a hub id.",
            show_default="the shipped models",
        ),
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="The grids of the committed results, for which it takes about half an hour.",
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace files that no study has written there, too."),
    ] = False,
) -> None:
    """Run all experiments and write tables, figures and the report into one folder.

    Grids are small, for a first look within minutes; --full has those of the committed results.
    With --model, what makes sense on that model is run on it, after what it takes has been
    measured and told. The same command goes on where an earlier one was interrupted. Open
    report.html in the folder afterwards. The exit status is 1 if an experiment failed; the report
    then holds the results of the others.
    """
    if model is None and (dtype, device) != ("float32", "cpu"):
        raise UserError("--dtype and --device are for a study of your own model: give --model too")
    if model is not None and full:
        raise UserError(
            "--full is for the shipped models; for more of one experiment on yours give it by "
            "itself, with the options that its --help lists"
        )
    experiments, console = load_experiments(), Console(stderr=True)
    names = [experiment.name for experiment in _chosen(experiments, only or ())]
    folder = output or Path("study" if model is None else f"study-{Path(model).resolve().name}")
    own = None
    if model is not None:
        former_study(folder, full_name(model), names, overwrite=overwrite)  # before it is loaded
        with console.status(f"getting to know {model}"):
            own = get_to_know(model, dtype, device)
    plan = plan_study(experiments, only or (), full=full)
    if own is not None:
        plan = plan_on(own, experiments, only or ())
        console.print(_announcement(plan, own))
    try:
        failed = run_plan(
            plan, experiments, folder, console, adding=bool(only), overwrite=overwrite
        )
    except KeyboardInterrupt:
        console.print(
            f"interrupted; the same command goes on with what is in {folder}, and "
            f"`python -m experiments report --input {folder}` shows it"
        )
        raise typer.Exit(130) from None
    Console().print(_outcome(folder))
    typer.echo(f"report: {folder / 'report.html'}")
    if failed:
        raise typer.Exit(1)
