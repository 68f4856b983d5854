"""Sweeps: answers from compressed contexts, by model, press, amount, mechanism and dataset.

A sweep is a grid of cells. Each is written down when it is finished, with what it takes to repeat
it; the same command continues where an earlier one was interrupted. See `experiments.answers`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pandas as pd
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments.answers.cells import Cell, Result, plan, press_text, run_cell
from experiments.answers.engines import Failure, on_ray, serial
from experiments.answers.settings import Settings, settings_from
from experiments.answers.setup import setup_of
from experiments.answers.store import Store, summary_of
from experiments.framework.intervals import bracket

Outcome = tuple[Result, float] | Failure
"""What came of a cell and the seconds that it took, or why nothing did."""


def timed_cell(settings: Settings, cell: Cell) -> tuple[Result, float]:
    """What comes of a cell, and the seconds that it takes, loading included."""
    start = perf_counter()
    return run_cell(settings, cell), perf_counter() - start


def sweep(
    settings: Settings, store: Store, console: Console, **ray: Any
) -> tuple[pd.DataFrame, dict[Cell, str]]:
    """Run the cells of `settings` that `store` does not hold yet, and write each down.

    Args:
        console: for progress.
        ray: arguments of `on_ray`; none: cells run one after the other in this process.

    Returns:
        The results of all cells in the store, and why cells of this sweep have none.
    """
    cells = plan(settings)
    finished = store.finished()
    waiting = [cell for cell in cells if cell.key not in finished]
    if len(waiting) < len(cells):
        console.print(f"{len(cells) - len(waiting)} of {len(cells)} cells are finished already")
    run = partial(timed_cell, settings)
    outcomes = on_ray(waiting, run, **ray) if ray else serial(waiting, run)
    failures = {}
    bar = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*bar, console=console, transient=True) as progress:
        for cell, outcome in shown(outcomes, len(waiting), progress):
            if isinstance(outcome, Failure):
                failures[cell] = outcome.reason
                continue
            result, seconds = outcome
            about = {"evicted": result.evicted, "press_text": press_text(settings, cell)}
            store.save(cell, result.rows, {**about, "seconds": round(seconds, 2)})
    return store.write_tables(cells), failures


def shown(
    outcomes: Iterator[tuple[Cell, Outcome]], total: int, progress: Progress
) -> Iterator[tuple[Cell, Outcome]]:
    """The outcomes, with a bar, and a line for each."""
    for cell, outcome in progress.track(outcomes, total=total, description="cells"):
        yield cell, outcome
        progress.console.print(_line(cell, outcome), markup=False, highlight=False)


def _line(cell: Cell, outcome: Outcome) -> str:
    name = f"{cell.dataset}  {cell.press}  {_asked(cell.ratio, cell.budget)}  {cell.mechanism}"
    if isinstance(outcome, Failure):
        return f"{name}: {outcome.reason}"
    result, seconds = outcome
    score = summary_of(result.rows)["score"]
    said = "not scored, " if score is None else f"{score:.1%} of "
    return f"{name}: {said}{len(result.rows)} in {seconds:.1f} s"


def _asked(ratio: float | None, budget: int | None) -> str:
    """What a press was told, in words; empty: nothing."""
    if budget is not None and not pd.isna(budget):
        return f"{budget} tokens"
    return "" if ratio is None or pd.isna(ratio) else f"{ratio:.0%}"


# ---- command -------------------------------------------------------------------------------------


class Engine(str, Enum):
    """What runs the cells."""

    SERIAL = "serial"
    RAY = "ray"


class FileFormat(str, Enum):
    """How tables are written."""

    CSV = "csv"
    PARQUET = "parquet"


def command(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with the settings below; flags override it.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for the results; the same one continues a sweep.")
    ] = Path("evaluation"),
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="Of the tables.")
    ] = FileFormat.CSV,
    on: Annotated[Engine, typer.Option(help="What runs the cells.")] = Engine.SERIAL,
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
    **flags: Any,
) -> None:
    """Accuracy by press, amount, mechanism and dataset, in a sweep that can be interrupted.

    Give the same command again to continue. The folder then holds results.csv (a row per cell),
    predictions.csv (a row per question) and setup.json (what it takes to repeat it). The exit
    status is 1 if a cell has no result.
    """
    settings = settings_from(config, flags)
    plan(settings)  # mistakes show before a folder is made
    console = Console(stderr=True)
    store = Store(output, setup_of(settings), file_format.value)
    ray: dict[str, Any] = {}
    if on is Engine.RAY:
        threads = settings.threads or torch.get_num_threads()
        on_gpu = settings.device != "cpu" and torch.cuda.is_available()
        gpus = float(on_gpu) if ray_gpus is None else ray_gpus
        ray = {"address": ray_address, "cpus": threads, "gpus": gpus, "retries": retries}
    try:
        results, failures = sweep(settings, store, console, **ray)
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command continues with what is in {output}")
        raise typer.Exit(130) from None
    Console().print(_results(results))
    for cell, reason in failures.items():
        console.print(f"no result: {' '.join(map(str, cell))}: {reason}", markup=False)
    typer.echo(f"results: {output}")
    if failures:
        raise typer.Exit(1)


def _with_settings() -> None:
    """Give `command` a flag for each setting that has one; what is not given is left to the file.

    A flag of the settings has no default of its own, so that the file may decide.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = get_type_hints(Settings, include_extras=True)
    flags = [_flag(f.name, hints[f.name]) for f in fields(Settings)]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own] + [f for f in flags if f]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def _flag(name: str, hint: Any) -> inspect.Parameter | None:
    kind, *about = get_args(hint)
    option = next((item for item in about if isinstance(item, typer.models.OptionInfo)), None)
    if option is None:
        return None
    default = getattr(Settings(), name)
    if kind is bool:
        option = typer.Option(f"--{name.replace('_', '-')}", help=option.help)
    elif default not in (None, ()):
        said = ", ".join(map(str, default)) if isinstance(default, tuple) else default
        option = typer.Option(help=f"{option.help} By default {said}.")
    annotation = Annotated[_plain(kind) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _plain(kind: Any) -> Any:
    """The type of a setting as typer knows it: what is allowed is checked with the settings."""
    if get_origin(kind) is tuple:
        return list[_plain(get_args(kind)[0])]  # type: ignore[misc]
    if get_origin(kind) is Annotated:
        return get_args(kind)[0]
    known = [_plain(part) for part in get_args(kind) if isinstance(part, type) or get_args(part)]
    inner = next((part for part in known if part is not type(None)), None)
    return kind if isinstance(kind, type) else inner or str


_with_settings()


def _results(results: pd.DataFrame) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("dataset", "press", "asked for", "evicted", "mechanism", "right in %"):
        justify = "right" if name in ("asked for", "evicted", "right in %") else "left"
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in results.to_dict("records"):
        known = not pd.isna(row["score"])
        ends = 100 * row["low"], 100 * row["high"]
        score = f"{100 * row['score']:.1f}{bracket(*ends, '.1f')}" if known else "not known"
        shares = _asked(row["ratio"], row["budget"]), f"{row['evicted']:.0%}"
        table.add_row(row["dataset"], press_words(row["press"]), *shares, row["mechanism"], score)
    return table


def press_words(press: str) -> str:
    """`AdaKVPress(SnapKVPress())` as `AdaKV(SnapKV)`."""
    return press.replace("Press()", "").replace("Press", "")
