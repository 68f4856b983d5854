"""The command of an experiment: flags from its options, progress bar, output and exit status."""

import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.models import OptionInfo

from experiments.framework.experiment import AnyExperiment, Tables
from experiments.framework.manifest import check_names, check_writable
from experiments.framework.results import write_figures, write_tables

SEED = 0
"""Seed of Python's, NumPy's and torch's generators before an experiment is measured."""

_Output = Annotated[Path | None, typer.Option(help="Folder to write tables and figures to.")]


def command_of(experiment: AnyExperiment) -> Callable[..., None]:
    """The command of an experiment for typer: a function with the options as parameters."""

    def run(flags: dict[str, Any], output: _Output = None) -> None:
        if output is not None:
            check_writable(output)
        tables = measured(experiment, replace(experiment.full, **flags), progress_bar())
        if output is not None:
            write_tables(tables, output)
        show(experiment, tables, Console())
        if output is not None:
            write_figures(experiment.figures(tables), output)
        if not experiment.passed(tables):
            raise typer.Exit(1)

    return with_flags(run, experiment.full, type(experiment).__doc__)


def with_flags(run: Callable[..., None], defaults: Any, help: str | None) -> Callable[..., None]:
    """A command that calls `run` with a dictionary of flags by name.

    Args:
        run: takes that dictionary first; its other parameters are flags too, passed by name.
        defaults: a frozen dataclass; each field with a `typer.Option` is a flag: see
            `Experiment.full`.
        help: help text of the command.
    """
    _, *own = inspect.signature(run, eval_str=True).parameters.values()
    kinds, hints = (
        get_type_hints(type(defaults), include_extras=extras) for extras in (False, True)
    )
    parameters = []
    for name, (*_, option) in ((name, get_args(hint)) for name, hint in hints.items()):
        if isinstance(option, OptionInfo):
            kind, default = kinds[name], getattr(defaults, name)
            if isinstance(default, tuple):
                item = get_args(kind)[0]
                item = str if get_origin(item) is Literal else item  # typer takes no list of these
                kind, default = list[item] | None, list(default) or None  # type: ignore[valid-type]
            flag = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            parameters.append(flag.replace(annotation=Annotated[kind, option]))
    parameters += [flag.replace(kind=flag.KEYWORD_ONLY) for flag in own]

    def command(**flags: Any) -> None:
        others = {flag.name: flags.pop(flag.name) for flag in own}
        for name, value in flags.items():
            if isinstance(getattr(defaults, name), tuple):
                # Typer passes None for an empty list; what is given twice counts once.
                flags[name] = tuple(dict.fromkeys(value or ()))
        run(flags, **others)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {flag.name: flag.annotation for flag in parameters}
    command.__doc__ = help
    return command


def measured(experiment: AnyExperiment, options: Any, progress: Progress) -> Tables:
    """Seed all generators, run an experiment and return its tables.

    Raises:
        ValueError: if a table's name does not start with the experiment's.
    """
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(SEED)
    with progress:
        tables = experiment.measure(options, progress)
    check_names(experiment.name, tables)
    return tables


def progress_bar(disable: bool = False) -> Progress:
    """A progress bar on stderr, hidden if that is no terminal, and removed at the end."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    hidden = disable or not console.is_terminal
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden)


def show(experiment: AnyExperiment, tables: Tables, console: Console) -> None:
    """Print views and findings."""
    for view in experiment.views(tables):
        console.print(Markdown(view.note))
        if view.rows:
            console.print(view.rich())
    console.print(Markdown("\n\n".join(found.text for found in experiment.findings(tables))))
