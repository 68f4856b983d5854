"""The study: what hooks and patches touch, break and cost, measured side by side."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # help has to come at once, and this imports pandas
    from experiments.framework.experiment import Experiment

EXPERIMENTS: tuple[str, ...] = (
    *("equivalence", "intrusiveness", "isolation", "coexistence", "overhead"),
    *("headwise", "quality", "evaluate", "streaming", "memory", "trace"),
)
"""Modules of this package that hold an experiment, in the order of the report.

Each has an `EXPERIMENT`, an `experiments.framework.experiment.Experiment`, and a function `command` for the
command line, where `experiments.cli.COMMANDS` says what its help is.
"""


class UserError(Exception):
    """What was asked for cannot be done; the message says why, and what to ask for instead."""


def load_experiments() -> list[Experiment]:
    """All experiments of the study, in the order of the report."""
    return [import_module(f"{__name__}.{name}").EXPERIMENT for name in EXPERIMENTS]
