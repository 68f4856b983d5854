"""Experiments that take no time, and a study of them."""

import json
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Annotated
from unittest.mock import patch

import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from experiments.cli import app
from experiments.framework.command import progress_bar
from experiments.framework.experiment import Experiment, Finding
from experiments.framework.manifest import MANIFEST
from experiments.framework.plan import plan_study
from experiments.framework.results import read_table, write_tables
from experiments.framework.tables import ResultTable
from experiments.study import run_plan
from experiments.testbed.facts import build_tokenizer
from tests.support import build, table_beside

COMMIT = "0" * 40
SILENT = progress_bar(disable=True)
REFUSED = table_beside(__file__, "refusals")
CASES = table_beside(__file__, "cases")


@dataclass(frozen=True)
class Options:
    last: Annotated[float, typer.Option(help="The last x.")] = 3.5


class Tiny(Experiment[Options]):
    """One table with a column x, and a figure, both of the experiment's name."""

    method = "Three numbers are written down. Others would have another mean."
    full, quick = Options(), Options(last=2.9)

    def __init__(self, name):
        self.name, self.title = name, f"The {name} experiment"
        self.question = f"What about {name}?"

    def measure(self, options, progress):
        return {self.name: pd.DataFrame({"x": [0.1, 2.0, options.last], "word": ["a", "b", "c"]})}

    def findings(self, tables):
        mean = tables[self.name]["x"].mean()
        text = f"The mean of {self.name} is **{mean:.3f}**."
        return [Finding("mean", text, f"know {self.name}", "works")]

    def views(self, tables):
        last = tables[self.name]["x"].iloc[-1]
        return [ResultTable("The last.", ["x"], [[last]], left=0), ResultTable("Nothing else.")]

    def figures(self, tables):
        figure = Figure(figsize=(3, 2))
        figure.subplots().plot(next(iter(tables.values()))["x"])
        figure.set_label("A line: x against row")
        return {self.name: figure}


def tiny(name, **changed):
    """A `Tiny` with other attributes, or methods that take no `self`."""
    experiment = Tiny(name)
    for attribute, value in changed.items():
        setattr(experiment, attribute, value)
    return experiment


def cli(*arguments, of=app, width=200, status=None, **options):
    """Invoke `python -m experiments` with these arguments.

    Args:
        of: another app to invoke.
        status: with which it has to end; None: with any.
    """
    runner = CliRunner(env={"COLUMNS": str(width)})
    result = runner.invoke(of, [str(argument) for argument in arguments], **options)
    assert status in (None, result.exit_code), (result.output, result.exception)
    return result


succeeded = partial(cli, status=0)
"""The same of a command that has to end well."""


def refused(*arguments):
    """The one line that a command which is refused prints."""
    result = cli(*arguments, status=2)
    assert result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith("error: ")
    return result.stderr


def failing(*_):
    raise RuntimeError("no <luck>\n [today]")


def study(chosen, folder, full=True, only=()):
    """Run a study; returns who failed, and what was printed."""
    console = Console(file=StringIO(), width=200)
    with patch("experiments.framework.environment.commit", return_value=COMMIT):
        failed = run_plan(plan_study(chosen, only, full=full), chosen, folder, console)
    return failed, console.file.getvalue()


def read_again(tables, folder):
    """What a study has of its tables when it reads the files that it has written."""
    write_tables(tables, folder)
    return {name: read_table(folder / f"{name}.csv") for name in tables}


def saved(folder, family="llama", **shape):
    """The folder, into which a tiny model goes with the tokenizer of the facts task."""
    build(family, **shape).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


ONE, TWO = tiny("one"), tiny("two")
BROKEN = tiny("broken", measure=failing)


def note(folder, name, **changed):
    """Change what the manifest says of an experiment."""
    told = json.loads((folder / MANIFEST).read_text())
    told["experiments"][name] |= changed
    (folder / MANIFEST).write_text(json.dumps(told))
