"""An experiment on the command line: flags from its options, a bar, tables, files, a status."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

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

    def run(options: Any, output: Path | None) -> None:
        if output is not None:
            check_writable(output)
        tables = measured(experiment, options, progress_bar())
        show(experiment, tables, Console())
        if output is not None:
            write_results(tables, experiment.figures(tables), output)
        if not experiment.passed(tables):
            raise typer.Exit(1)

    return with_flags(run, experiment.full, type(experiment).__doc__, output=_Output)


def with_flags(
    run: Callable[..., None], defaults: Any, help: str | None, **more: Any
) -> Callable[..., None]:
    """A command that calls `run` with its flags as one record.

    Args:
        defaults: a frozen dataclass, each of whose fields is a flag: see `Experiment.full`.
        more: annotations of flags that `run` is given by name; None where they are absent.
    """
    hints, parameters = get_type_hints(type(defaults), include_extras=True), []
    for field in fields(defaults):
        kind, option = get_args(hints[field.name])
        default = getattr(defaults, field.name)
        if isinstance(default, tuple):
            default = list(default) or None
            kind = list[get_args(kind)[0]] if default else list[get_args(kind)[0]] | None  # type: ignore[misc]
        parameters.append(_parameter(field.name, Annotated[kind, option], default))
    parameters += [_parameter(name, annotation, None) for name, annotation in more.items()]

    def command(**flags: Any) -> None:
        others = {name: flags.pop(name) for name in more}
        for name, value in flags.items():
            if isinstance(getattr(defaults, name), tuple):
                flags[name] = tuple(value or ())  # typer gives None for a list without a value
        run(replace(defaults, **flags), **others)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {flag.name: flag.annotation for flag in parameters}
    command.__doc__ = help
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


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
