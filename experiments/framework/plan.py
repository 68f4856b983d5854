"""The plan of a study: which experiments run, on the shipped models or on the user's own."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from experiments import UserError
from experiments.framework.experiment import AnyExperiment
from experiments.framework.own_model import LeftOutError, OwnModel, Planned
from experiments.framework.tables import ResultTable
from experiments.framework.wording import about_seconds


class Task(NamedTuple):
    """An experiment with its options.

    Attributes:
        repeat: the command that repeats it with the same options.
    """

    experiment: AnyExperiment
    planned: Planned[Any]
    repeat: str

    @property
    def name(self) -> str:
        return self.experiment.name


class Plan(NamedTuple):
    """What a study runs.

    Attributes:
        tasks: the tasks, in order.
        model: the user's own model, as it was given; None: the shipped models.
        left_out: by experiment, why it does not run on the user's model.
        quick: whether grids are small.
        adding: whether the folder's results of other experiments stay.
    """

    tasks: list[Task]
    model: str | None = None
    left_out: Mapping[str, str] = {}
    quick: bool = True
    adding: bool = False

    @property
    def names(self) -> list[str]:
        return [task.name for task in self.tasks]


def plan_study(
    experiments: Sequence[AnyExperiment], only: Sequence[str] = (), *, full: bool = False
) -> Plan:
    """The plan of a study of the shipped models.

    Args:
        only: names of the experiments to run; empty: all.
        full: whether to use the options of the committed results instead of the quick ones.
    """
    tasks = []
    for each in _chosen(experiments, only):
        repeat = each.name if full or each.quick == each.full else f"study --only {each.name}"
        planned = Planned(each.full if full else each.quick)
        tasks.append(Task(each, planned, f"python -m experiments {repeat}"))
    return Plan(tasks, quick=not full, adding=bool(only))


def plan_on(own: OwnModel, experiments: Sequence[AnyExperiment], only: Sequence[str] = ()) -> Plan:
    """The plan of a study of the user's own model.

    Raises:
        UserError: if an experiment in `only` does not apply to the model.
    """
    study = f"python -m experiments study --model {shlex.quote(own.model)}{own.flags}"
    tasks, left_out = [], {}
    for each in _chosen(experiments, only):
        try:
            tasks.append(Task(each, each.on(own), f"{study} --only {each.name}"))
        except LeftOutError as reason:
            left_out[each.name] = str(reason)
    if only and left_out:
        reasons = "; ".join(f"{name} is left out: {reason}" for name, reason in left_out.items())
        raise UserError(f"on {own.name} {reasons}")
    return Plan(tasks, own.model, left_out, adding=bool(only))


def _chosen(experiments: Sequence[AnyExperiment], only: Sequence[str]) -> list[AnyExperiment]:
    return [experiment for experiment in experiments if not only or experiment.name in only]


def announcement(plan: Plan, own: OwnModel) -> Table:
    """A table of what will run on the user's model, its estimated time, and what is left out."""
    seconds = sum(task.planned.duration(own) or 0 for task in plan.tasks)
    title = (
        f"{own.name} ({own.parameters / 1e6:,.1f} M parameters in {own.dtype} on {own.device}: "
        f"{1 / own.token_seconds:,.0f} tokens a second in a prefill, "
        f"{1 / own.step_seconds:,.1f} while decoding) will take about {about_seconds(seconds)}"
    )
    rows = []
    for task in plan.tasks:
        about = f"{task.experiment.question} {task.planned.note}".strip()
        rows.append((task.name, about_seconds(task.planned.duration(own)), about))
    rows += [(name, "left out", reason) for name, reason in plan.left_out.items()]
    table = ResultTable("", ("experiment", "takes about", ""), rows, left=None).rich()
    table.title, table.title_justify = title, "left"
    return table
