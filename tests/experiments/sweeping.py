"""Small sweeps, for tests."""

from dataclasses import replace
from io import StringIO

import pandas as pd
import typer
from rich.console import Console

from experiments.answers import sweep as sweeps
from experiments.answers.settings import Settings
from experiments.answers.store import Store
from experiments.answers.sweep import sweep
from tests.experiments.tiny import cli

SMALL = Settings(
    dataset=("facts/single@48", "facts/multiquery@48"),
    press=("SnapKVPress(window_size=8)",),
    ratio=(0.0, 0.5),
    samples=8,
    threads=1,
)
ONE = replace(SMALL, dataset=("facts/single@48",))
FILES = {"setup.json", "cells", "results.csv", "predictions.csv"}
SETUP = {"model": "facts-llama", "seed": 0, "versions": {"torch": "1"}, "made_with": {"date": "x"}}


def run_sweep(settings, folder, **ray):
    """Run a sweep in `folder`; returns results, failures and what was printed."""
    printed = StringIO()
    kept = Store(folder, SETUP)
    return *sweep(settings, kept, Console(file=printed, width=200), **ray), printed.getvalue()


def assert_same(results, others):
    pd.testing.assert_frame_equal(*(t.drop(columns="seconds") for t in (results, others)))


app = typer.Typer()
app.command()(sweeps.command)


def call(*args, width=160, **options):
    small = "--samples", "4", "--threads", "1", "--dataset", "facts/single@48"
    return cli(*small, *args, of=app, width=width, **options)
