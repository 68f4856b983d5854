"""Run all experiments and write tables, figures, manifest and report into one folder.

By default the study runs on the shipped models and on small ones with random weights. With
`--model` it runs on the user's model; `Experiment.on` says what each experiment does there.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
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
from experiments.framework.results import drawn, read_parts, read_table, write_figures, write_tables
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

    If an experiment fails, the report says so and the others still run. If the same study was
    interrupted in this folder, its finished experiments are not run again. Files of a former
    study, as listed in its manifest, are removed first.

    Args:
        experiments: all known experiments, in the order of the report.
        output: folder for the CSV and SVG files, `run.json`, `report.md` and `report.html`; created
            if absent.
        console: receives progress and tracebacks.
        overwrite: whether files that no study has written may be replaced.

    Returns:
        Names of the experiments that failed.

    Raises:
        UserError: if the folder cannot be written to, or holds other files that would be lost.
    """
    former = former_study(output, plan.model, plan.names, overwrite=overwrite)
    manifest, order = _begun(plan, former, output), [each.name for each in experiments]
    tasks = [task for task in plan.tasks if task.name not in manifest.experiments]
    if len(tasks) < len(plan.tasks):
        console.print(
            f"{len(plan.tasks) - len(tasks)} of {len(plan.tasks)} experiments were finished before "
            f"an interrupt, and are in {output}; to start from scratch give another --output"
        )
    for file in sorted((former.files if former else set()) - manifest.files):
        (output / file).unlink(missing_ok=True)
    write_manifest(manifest, output)
    # It is written last, so a study without it was interrupted.
    (output / "report.html").unlink(missing_ok=True)
    for number, task in enumerate(tasks, 1):
        # Plain lines, because each experiment draws its own progress bar.
        console.rule(f"{number} of {len(tasks)}: {task.experiment.title}", align="left")
        for entry in _run(task, manifest.versions, output, console):
            before, manifest = manifest, manifest.noting(task.name, entry, order)
            write_manifest(manifest, output, after=before)
        status = f"failed: {entry.error}," if entry.error else "done"
        console.print(f"{status} in {entry.seconds:.1f} s", markup=False, highlight=False)
    with console.status("writing the report"):
        write_report(output, experiments)
    return [name for name, entry in manifest.experiments.items() if entry.error]


def _begun(plan: Plan, former: Manifest | None, output: Path) -> Manifest:
    """The manifest of a study at its start, with the entries that a former study leaves to it."""
    made, tasks = environment.environment_info(), {task.name: task for task in plan.tasks}
    made_with = made["commit"], made["versions"]
    kept: dict[str, Entry] = {}
    left_out, waiting, quick = dict(plan.left_out), plan.names, plan.quick
    if former and plan.adding:
        kept = {name: e for name, e in former.experiments.items() if name not in tasks}
        left_out = {n: why for n, why in former.left_out.items() if n not in tasks} | left_out
        waiting = [*(name for name in former.waiting if name not in tasks), *waiting]
        quick = former.quick
    elif former and (former.waiting or not (output / "report.html").exists()):  # it was interrupted
        with suppress(UserError):  # tables that cannot be read any more are all measured anew
            read_parts(output, [task.experiment for task in plan.tasks])
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
    """Run one experiment and write its tables and figures.

    Yields:
        Entries for the manifest: before files are written, with their names; at the end, with the
        error and the seconds.
    """
    start, experiment, error = perf_counter(), task.experiment, None
    entry = Entry(
        error=UNFINISHED,
        commit=environment.commit(),
        date=environment.now(),
        versions=versions,
        repeat=task.repeat,
        options=repr(task.planned.options),
        note=task.planned.note,
    )
    try:
        tables = measured(experiment, task.planned.options, progress_bar())
        yield (entry := entry.model_copy(update={"tables": list(tables)}))
        write_tables(tables, folder)
        # Figures and report are made from the files, as the command `report` does.
        tables = {name: read_table(folder / f"{name}.csv") for name in tables}
        figures, shown = drawn(experiment, tables)
        yield (entry := entry.model_copy(update={"figures": shown}))
        write_figures(figures, folder)
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
            help="Experiment to run; the folder's results of the others stay. Repeatable.",
            show_default="all",
            callback=one_of(EXPERIMENTS),
        ),
    ] = ()
    model: Annotated[
        str | None,
        typer.Option(
            help="Your own model to study: a folder that save_pretrained wrote, with its "
            "tokenizer, or a hub id.",
            show_default="the shipped models",
        ),
    ] = None
    dtype: Dtype = "float32"
    device: Device = "cpu"
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Use the grids of the committed results, which take about an hour."
        ),
    ] = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files, too, that no study has written.")
    ] = False


def _study(flags: dict[str, Any]) -> None:
    """Run all experiments and write tables, figures and the report into one folder.

    By default grids are small and take minutes; --full uses those of the committed results. With
    --model, the experiments that apply to that model run on it, and an estimate of their duration
    is printed first. After an interrupt, the same command continues the study. Open report.html in
    the folder afterwards. The exit status is 1 if an experiment failed; the report then holds the
    results of the others.
    """
    options = Options(**flags)
    if options.model is None and (options.dtype, options.device) != ("float32", "cpu"):
        raise UserError("--dtype and --device are for a study of your own model: give --model too")
    if options.model is not None and options.full:
        raise UserError(
            "--full is for the shipped models; to run more of one experiment on yours, run its own "
            "command with the options that its --help lists"
        )
    experiments, console = load_experiments(), Console(stderr=True)
    own_name = "" if options.model is None else f"-{Path(options.model).resolve().name}"
    folder = options.output or Path(f"study{own_name}")
    plan = plan_study(experiments, options.only, full=options.full)
    if options.model is not None:
        # Check the folder before the model is loaded.
        former_study(folder, full_name(options.model), plan.names, overwrite=options.overwrite)
        with console.status(f"getting to know {options.model}"):
            own = get_to_know(options.model, options.dtype, options.device)
        plan = plan_on(own, experiments, options.only)
        console.print(announcement(plan, own))
    try:
        failed = run_plan(plan, experiments, folder, console, overwrite=options.overwrite)
    except KeyboardInterrupt:
        console.print(
            f"interrupted; the same command continues with what is in {folder}, and "
            f"`python -m experiments report --input {quote(str(folder))}` shows it"
        )
        raise typer.Exit(130) from None
    typer.echo(f"report: {folder / 'report.html'}")
    if failed:
        raise typer.Exit(1)


command = with_flags(_study, Options(), _study.__doc__)
