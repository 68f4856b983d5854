"""An experiment on the command line: flags from its options, a bar, tables, files, a status."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import torch
import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.framework.experiment import AnyExperiment, Tables
from experiments.framework.manifest import check_writable
from experiments.framework.results import write_results

SEED = 0
"""What Python's, NumPy's and torch's generators are set to before an experiment is measured."""

_Output = Annotated[
    Path | None, typer.Option(help="Folder to write the tables and the figures to.")
]


def command_of(experiment: AnyExperiment) -> Callable[..., None]:
    """The command of an experiment: a function with its options as parameters, for typer."""

    def command(output: Path | None, **flags: Any) -> None:
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in flags.items()}
        # None is what typer gives for a list without a value.
        options = type(experiment.full)(
            **{name: _of_none(experiment, name) if v is None else v for name, v in given.items()}
        )
        if output is not None:
            check_writable(output)
        tables = measured(experiment, options, progress_bar())
        show(experiment, tables, Console())
        if output is not None:
            write_results(tables, experiment.figures(tables), output)
        if not experiment.passed(tables):
            raise typer.Exit(1)

    parameters = [*_flags(experiment), _parameter("output", _Output, None)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {flag.name: flag.annotation for flag in parameters}
    command.__doc__ = type(experiment).__doc__
    return command


def measured(experiment: AnyExperiment, options: Any, progress: Progress) -> Tables:
    """The tables of an experiment: the same ones whatever was run before."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(SEED)
    with progress:
        return experiment.measure(options, progress)


def progress_bar(disable: bool = False) -> Progress:
    """How far an experiment is, on stderr if that is a terminal; gone when it is done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    hidden = disable or not console.is_terminal
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden)


def show(experiment: AnyExperiment, tables: Tables, console: Console) -> None:
    """Print what was found."""
    for view in experiment.views(tables):
        console.print(Markdown(view.note))
        if view.rows:
            console.print(view.rich())
    paragraphs = [*experiment.remarks(tables), *(f.text for f in experiment.findings(tables))]
    console.print(Markdown("\n\n".join(paragraphs)))


def _flags(experiment: AnyExperiment) -> list[inspect.Parameter]:
    hints = get_type_hints(type(experiment.full), include_extras=True)
    flags = []
    for field in fields(experiment.full):
        kind, option = get_args(hints[field.name])
        default = getattr(experiment.full, field.name)
        if get_origin(kind) is tuple:
            kind, default = list[get_args(kind)[0]], list(default) or None  # type: ignore[misc]
            kind = kind if default else kind | None
        flags.append(_parameter(field.name, Annotated[kind, option], default))
    return flags


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _of_none(experiment: AnyExperiment, name: str) -> Any:
    return () if isinstance(getattr(experiment.full, name), tuple) else None
