"""Sweeps: answers from compressed contexts, by model, press, amount, mechanism and dataset.

A sweep is a grid of cells. Each finished cell is written to a file; after an interrupt, the same
command continues the sweep. See `experiments.answers`.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.answers.cells import Cell, loaded, plan, run_cell
from experiments.answers.engines import Failure, Outcomes, on_ray, serial
from experiments.answers.settings import Settings, settings_from
from experiments.answers.store import Store, setup_of
from experiments.framework.command import with_flags
from experiments.framework.intervals import bracketed
from experiments.framework.plots import is_own, press_label
from experiments.framework.tables import ResultTable


def sweep(
    settings: Settings, store: Store, console: Console, **ray: Any
) -> tuple[pd.DataFrame, dict[str, list[Cell]]]:
    """Run the cells of `settings` that `store` does not hold yet, and save each.

    Args:
        console: receives progress.
        ray: arguments of `on_ray`; none: cells run one after the other in this process.

    Returns:
        The results of all cells in the store, and by reason the cells that failed.
    """
    cells = plan(settings)
    finished = store.finished()
    waiting = [cell for cell in cells if cell not in finished]
    if len(waiting) < len(cells):
        console.print(f"{len(cells) - len(waiting)} of {len(cells)} cells are finished already")
    if waiting and not ray:
        with console.status(f"loading {settings.model}"):
            loaded(settings)  # once, so that an error is not repeated for every cell
    run = partial(run_cell, settings)
    outcomes = on_ray(waiting, run, **ray) if ray else serial(waiting, run)
    failures: dict[str, list[Cell]] = {}
    try:
        with Progress(console=console, transient=True) as progress:
            for cell, outcome in shown(outcomes, len(waiting), progress):
                if isinstance(outcome, Failure):
                    failures.setdefault(outcome.reason, []).append(cell)
                else:
                    store.save(outcome)
    finally:  # after an interrupt, too
        results = store.write_tables(cells)
    return results, failures


def shown(outcomes: Outcomes, total: int, progress: Progress) -> Outcomes:
    """Yield the outcomes, with a progress bar and a printed line for each."""
    known = set[str]()
    for cell, outcome in progress.track(outcomes, total=total, description="cells"):
        yield cell, outcome
        if isinstance(outcome, Failure):
            text = "no result, as above" if outcome.reason in known else outcome.reason
            known.add(outcome.reason)
        else:
            row = outcome.summary()
            score = "not scored, " if row["score"] is None else f"{row['score']:.1%} of "
            text = f"{score}{row['questions']} in {outcome.seconds:.1f} s"
        progress.console.print(f"{_named(cell)}: {text}", markup=False, highlight=False)


def _named(cell: Cell) -> str:
    return f"{cell.dataset}  {cell.press}  {_amount(cell.ratio, cell.budget)}  {cell.mechanism}"


def _amount(ratio: float | None, budget: int | None) -> str:
    """The ratio or budget of a cell as text; empty if it has neither."""
    if pd.notna(budget):
        return f"{budget} tokens"
    return "" if pd.isna(ratio) else f"{ratio:.0%}"


# ---- command -------------------------------------------------------------------------------------


def _sweep(
    flags: dict[str, Any],
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with the same settings; flags override it.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for the results; the same one continues a sweep.")
    ] = Path("evaluation"),
    on: Annotated[Literal["serial", "ray"], typer.Option(help="What runs the cells.")] = "serial",
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster to join; one on this machine if not given.")
    ] = None,
    ray_gpus: Annotated[
        float | None,
        typer.Option(help="GPUs of a Ray worker; 1 unless the device is cpu, or there are none."),
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="How often a cell is run again when its Ray worker dies.")
    ] = 3,
) -> None:
    """Accuracy by press, amount, mechanism and dataset, in a sweep that can be interrupted.

    Give the same command again to continue. The folder then holds results.csv (a row per cell),
    predictions.csv (a row per question) and setup.json (model, versions and other settings). The
    exit status is 1 if a cell has no result.
    """
    # Only flags that were given override the file, not the defaults of the others.
    sources = {name: ctx.get_parameter_source(name) for name in flags}
    given = {n: flags[n] for n, source in sources.items() if source and source.name != "DEFAULT"}
    settings = settings_from(config, given)
    plan(settings)  # errors are raised before a folder is created
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    gpus = float(on_gpu) if ray_gpus is None else ray_gpus
    cpus = settings.threads or torch.get_num_threads()
    ray = {"address": ray_address, "cpus": cpus, "gpus": gpus, "retries": retries}
    failures = _run(settings, output, ray if on == "ray" else {})
    typer.echo(f"results: {output}")
    if failures:
        raise typer.Exit(1)


def _run(settings: Settings, output: Path, ray: dict[str, Any]) -> dict[str, list[Cell]]:
    """Run the sweep and print its table; returns by reason the cells that failed."""
    console, store = Console(stderr=True), Store(output, setup_of(settings))
    try:
        results, failures = sweep(settings, store, console, **ray)
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command continues with what is in {output}")
        raise typer.Exit(130) from None
    Console().print(_results(results))
    for reason, (first, *others) in failures.items():
        more = f" and {len(others)} more" if others else ""
        console.print(f"no result: {_named(first)}{more}: {reason}", markup=False)
    return failures


command = with_flags(_sweep, Settings(), _sweep.__doc__)


def _results(results: pd.DataFrame) -> Table:
    head = "dataset", "press", "mechanism", "asked for", "evicted", "right"
    rows = [
        [
            *(row["dataset"], press_words(row["press"]), row["mechanism"]),
            *(_amount(row["ratio"], row["budget"]), f"{row['evicted']:.0%}"),
            "not known" if pd.isna(row["score"]) else bracketed(row, "score", ".1%"),
        ]
        for row in results.to_dict("records")
    ]
    return ResultTable("", head, rows, left=3).rich()


def press_words(press: str) -> str:
    """The short name of a press: `AdaKV(SnapKV)` for `AdaKVPress(SnapKVPress())`."""
    if is_own(press):
        return press_label(press)
    return press.replace("Press()", "").replace("Press", "")
