"""All experiments, one after the other, into one folder: tables, figures, manifest and report.

The study of this project runs on the shipped models and on small ones with random weights. With
`--model` what makes sense on a model of the user's own runs on that: each experiment says itself
what (`Experiment.on`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments import EXPERIMENTS, UserError, load_experiments
from experiments.framework import environment
from experiments.framework.command import SEED, measured, progress_bar, with_flags
from experiments.framework.experiment import AnyExperiment
from experiments.framework.manifest import UNFINISHED, Entry, Manifest, former_study, write_manifest
from experiments.framework.options import Device, Dtype, one_of
from experiments.framework.plan import Plan, Task, announcement, plan_on, plan_study
from experiments.framework.report import write_report
from experiments.framework.results import drawn, read_table, write_figures, write_tables
from experiments.framework.wording import in_one_line
from experiments.testbed.getting_to_know import full_name, get_to_know


def run_plan(
    plan: Plan,
    experiments: Sequence[AnyExperiment],
    output: Path,
    console: Console,
    *,
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
        overwrite: whether files that no study has written there may be replaced.

    Returns:
        Names of the experiments that failed.

    Raises:
        UserError: if the folder cannot be written to, or holds something else.
    """
    former = former_study(output, plan.model, plan.names, overwrite=overwrite)
    manifest, order = _begun(plan, former), [each.name for each in experiments]
    tasks = [task for task in plan.tasks if task.name not in manifest.experiments]
    if len(tasks) < len(plan.tasks):
        console.print(
            f"{len(plan.tasks) - len(tasks)} of {len(plan.tasks)} experiments were finished before "
            f"an interrupt, and are in {output}; for a study from the start give another --output"
        )
    for file in sorted((former.files if former else set()) - manifest.files):
        (output / file).unlink(missing_ok=True)
    write_manifest(manifest, output)
    for number, task in enumerate(tasks, 1):
        # Plain lines: experiments draw progress bars of their own.
        console.rule(f"{number} of {len(tasks)}: {task.experiment.title}", align="left")
        for entry in _run(task, manifest.versions, output, console):
            manifest = manifest.noting(task.name, entry, order)
            write_manifest(manifest, output)
        said = f"failed: {entry.error}," if entry.error else "done"
        console.print(f"{said} in {entry.seconds:.1f} s", markup=False, highlight=False)
    write_report(output, experiments)
    return [name for name, entry in manifest.experiments.items() if entry.error]


def _begun(plan: Plan, former: Manifest | None) -> Manifest:
    """The manifest of a study of which nothing is done but what stays of an earlier one."""
    made, tasks = environment.environment_info(), {task.name: task for task in plan.tasks}
    made_with = made["commit"], made["versions"]
    kept: dict[str, Entry] = {}
    left_out, waiting, quick = dict(plan.left_out), plan.names, plan.quick
    if former and plan.adding:
        kept = {name: e for name, e in former.experiments.items() if name not in tasks}
        left_out = {n: why for n, why in former.left_out.items() if n not in tasks} | left_out
        waiting = [*(name for name in former.waiting if name not in tasks), *waiting]
        quick = former.quick
    elif former and former.waiting:  # it was interrupted
        for name, entry in former.experiments.items():
            same = name in tasks and entry.options == repr(tasks[name].planned.options)
            if same and not entry.error and (entry.commit, entry.versions) == made_with:
                kept[name] = entry
        waiting = [name for name in waiting if name not in kept]
    return Manifest(
        **made,
        seed=SEED,
        model=plan.model,
        quick=quick,
        left_out=left_out,
        waiting=waiting,
        experiments=kept,
    )


def _run(task: Task, versions: dict[str, str], folder: Path, console: Console) -> Iterator[Entry]:
    """Measure and write.

    Yields:
        What is to be noted: which files will be written, before they are; in the end, how it went.
    """
    start, experiment, error = perf_counter(), task.experiment, None
    entry = Entry(
        error=UNFINISHED,
        commit=environment.commit(),
        versions=versions,
        repeat=task.repeat,
        options=repr(task.planned.options),
        note=task.planned.note,
    )
    try:
        tables = measured(experiment, task.planned.options, progress_bar())
        yield (entry := entry.model_copy(update={"tables": list(tables)}))
        write_tables(tables, folder)
        # From here on as whoever rebuilds the report will: from the files.
        tables = {name: read_table(folder / f"{name}.csv") for name in tables}
        figures, shown = drawn(experiment, tables)
        yield (entry := entry.model_copy(update={"figures": shown}))
        write_figures(figures, folder)
        experiment.markdown(tables)
    except Exception as failure:
        error = in_one_line(failure)
        console.print(traceback.format_exc(), markup=False, highlight=False)
    yield entry.model_copy(update={"error": error, "seconds": round(perf_counter() - start, 2)})


# ---- command -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What to run, on which model, and where to write it."""

    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write to; `results` for the committed results.",
            show_default="study, or study-NAME with --model",
        ),
    ] = None
    only: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Experiment to run; what the folder holds of the others stays. Repeatable.",
            show_default="all",
            callback=one_of(EXPERIMENTS),
        ),
    ] = ()
    model: Annotated[
        str | None,
        typer.Option(
            help="A model of your own to study: a folder that save_pretrained wrote, with its "
            "tokenizer, or a hub id.",
            show_default="the shipped models",
        ),
    ] = None
    dtype: Dtype = "float32"
    device: Device = "cpu"
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="The grids of the committed results, for which it takes about half an hour.",
        ),
    ] = False
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace files that no study has written there, too."),
    ] = False


def _study(flags: dict[str, Any]) -> None:
    """Run all experiments and write tables, figures and the report into one folder.

    Grids are small, for a first look within minutes; --full has those of the committed results.
    With --model, what makes sense on that model is run on it, after what it takes has been
    measured and told. The same command goes on where an earlier one was interrupted. Open
    report.html in the folder afterwards. The exit status is 1 if an experiment failed; the report
    then holds the results of the others.
    """
    told = Options(**flags)
    if told.model is None and (told.dtype, told.device) != ("float32", "cpu"):
        raise UserError("--dtype and --device are for a study of your own model: give --model too")
    if told.model is not None and told.full:
        raise UserError(
            "--full is for the shipped models; for more of one experiment on yours give it by "
            "itself, with the options that its --help lists"
        )
    experiments, console = load_experiments(), Console(stderr=True)
    own_name = "" if told.model is None else f"-{Path(told.model).resolve().name}"
    folder = told.output or Path(f"study{own_name}")
    plan = plan_study(experiments, told.only, full=told.full)
    if told.model is not None:
        # Before the model is loaded.
        former_study(folder, full_name(told.model), plan.names, overwrite=told.overwrite)
        with console.status(f"getting to know {told.model}"):
            own = get_to_know(told.model, told.dtype, told.device)
        plan = plan_on(own, experiments, told.only)
        console.print(announcement(plan, own))
    try:
        failed = run_plan(plan, experiments, folder, console, overwrite=told.overwrite)
    except KeyboardInterrupt:
        console.print(
            f"interrupted; the same command goes on with what is in {folder}, and "
            f"`python -m experiments report --input {folder}` shows it"
        )
        raise typer.Exit(130) from None
    typer.echo(f"report: {folder / 'report.html'}")
    if failed:
        raise typer.Exit(1)


command = with_flags(_study, Options(), _study.__doc__)
