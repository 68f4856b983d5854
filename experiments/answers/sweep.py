"""Sweeps: answers from compressed contexts, by model, press, amount, mechanism and dataset.

A sweep is a grid of cells. Each is written down when it is finished, with what it takes to repeat
it; the same command continues where an earlier one was interrupted. See `experiments.answers`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pandas as pd
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.answers.cells import Cell, Result, plan, run_cell
from experiments.answers.engines import Failure, on_ray, serial
from experiments.answers.settings import Settings, settings_from
from experiments.answers.setup import setup_of
from experiments.answers.store import Store
from experiments.framework.intervals import bracket


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
    waiting = [cell for cell in cells if cell not in finished]
    if len(waiting) < len(cells):
        console.print(f"{len(cells) - len(waiting)} of {len(cells)} cells are finished already")
    run = partial(run_cell, settings)
    outcomes = on_ray(waiting, run, **ray) if ray else serial(waiting, run)
    failures = {}
    with Progress(console=console, transient=True) as progress:
        for cell, outcome in shown(outcomes, len(waiting), progress):
            if isinstance(outcome, Failure):
                failures[cell] = outcome.reason
            else:
                store.save(outcome)
    return store.write_tables(cells), failures


def shown(
    outcomes: Iterator[tuple[Cell, Result | Failure]], total: int, progress: Progress
) -> Iterator[tuple[Cell, Result | Failure]]:
    """The outcomes, with a bar, and a line for each."""
    for cell, outcome in progress.track(outcomes, total=total, description="cells"):
        yield cell, outcome
        if isinstance(outcome, Failure):
            said = outcome.reason
        else:
            row = outcome.summary()
            score = "not scored, " if row["score"] is None else f"{row['score']:.1%} of "
            said = f"{score}{row['questions']} in {outcome.seconds:.1f} s"
        name = f"{cell.dataset}  {cell.press}  {_asked(cell.ratio, cell.budget)}  {cell.mechanism}"
        progress.console.print(f"{name}: {said}", markup=False, highlight=False)


def _asked(ratio: float | None, budget: int | None) -> str:
    """What a press was told, in words; empty: nothing."""
    if pd.notna(budget):
        return f"{budget} tokens"
    return "" if pd.isna(ratio) else f"{ratio:.0%}"


# ---- command -------------------------------------------------------------------------------------


def command(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with the settings below; flags override it.")
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
    store = Store(output, setup_of(settings))
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    gpus = float(on_gpu) if ray_gpus is None else ray_gpus
    cpus = settings.threads or torch.get_num_threads()
    ray = {"address": ray_address, "cpus": cpus, "gpus": gpus, "retries": retries}
    try:
        results, failures = sweep(settings, store, console, **(ray if on == "ray" else {}))
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
    """Give `command` a flag for each setting that has one."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = get_type_hints(Settings, include_extras=True)
    flags = [_flag(f.name, hints[f.name]) for f in fields(Settings)]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own] + [f for f in flags if f]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def _flag(name: str, hint: Any) -> inspect.Parameter | None:
    """A flag without a default, so that the file may decide."""
    kind, *about = get_args(hint)
    option = next((item for item in about if isinstance(item, typer.models.OptionInfo)), None)
    if option is None:
        return None
    default = getattr(Settings(), name)
    said = ", ".join(map(str, default)) if isinstance(default, tuple) else default
    usual = f" By default {said}." if said not in (None, "", False) else ""
    names = (f"--{name.replace('_', '-')}",) if kind is bool else ()
    several = get_origin(kind) is tuple
    plain = list[_plain(kind)] if several else _plain(kind)  # type: ignore[misc]
    annotation = Annotated[plain | None, typer.Option(*names, help=f"{option.help}{usual}")]  # type: ignore[valid-type]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _plain(kind: Any) -> Any:
    """The type of one value as typer knows it: what is allowed is checked with the settings."""
    if get_origin(kind) is Literal:
        return str
    return _plain(get_args(kind)[0]) if get_args(kind) else kind


_with_settings()


def _results(results: pd.DataFrame) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("dataset", "press", "asked for", "evicted", "mechanism", "right in %"):
        justify = "right" if name in ("asked for", "evicted", "right in %") else "left"
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in results.to_dict("records"):
        ends = 100 * row["low"], 100 * row["high"]
        known = not pd.isna(row["score"])
        score = f"{100 * row['score']:.1f}{bracket(*ends, '.1f')}" if known else "not known"
        shares = _asked(row["ratio"], row["budget"]), f"{row['evicted']:.0%}"
        table.add_row(row["dataset"], press_words(row["press"]), *shares, row["mechanism"], score)
    return table


def press_words(press: str) -> str:
    """`AdaKVPress(SnapKVPress())` as `AdaKV(SnapKV)`."""
    return press.replace("Press()", "").replace("Press", "")
