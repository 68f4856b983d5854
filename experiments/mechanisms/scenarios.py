"""Scenarios: somebody answers while a mechanism is open or after it was, and is held to account.

A scenario is a generator: it opens and closes what it is about, and yields whom to ask meanwhile.
"""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import PreTrainedModel

from experiments.framework.experiment import Experiment, Tables
from experiments.framework.heatmap import OutcomeMatrix
from experiments.framework.options import one_of
from experiments.framework.own_model import SMALL, LeftOutError, OwnModel, Planned
from experiments.framework.wording import in_one_line
from experiments.mechanisms.contain import contained
from experiments.testbed.families import FAMILIES
from experiments.testbed.response import Response

OptionsT = TypeVar("OptionsT")


class Moment(NamedTuple):
    """Somebody to ask, and the right answer.

    Attributes:
        when: of the scenario this is.
        tolerance: see `Response.difference`.
    """

    when: str
    right: Response
    ask: Callable[[], Response]
    tolerance: float = 0.0


class Wrong(NamedTuple):
    """What was not right.

    Attributes:
        when: as in `Moment`; empty: in opening or closing something.
        text: the difference, or the error.
        is_error: whether an error was raised.
    """

    when: str
    text: str
    is_error: bool

    @property
    def detail(self) -> str:
        return f"{self.when}: {self.text}" if self.when else self.text


def wrongs(scenario: Iterator[Moment], model: PreTrainedModel) -> list[Wrong]:
    """What is not right in a scenario, in order.

    What it leaves behind in the process, as far as models of the kind of `model` see that, is put
    back. Warnings of libraries that notice each other are not shown.
    """
    found = []
    with contained(model), _quiet():
        try:
            for moment in scenario:
                found += _asked(moment)
        except Exception as error:  # whatever comes is the result
            found.append(Wrong("", in_one_line(error), is_error=True))
    return found


def _asked(moment: Moment) -> list[Wrong]:
    try:
        difference = moment.right.difference(moment.ask(), moment.tolerance)
    except Exception as error:
        return [Wrong(moment.when, in_one_line(error), is_error=True)]
    return [Wrong(moment.when, difference, is_error=False)] if difference else []


@contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


# ---- an experiment over scenarios ----------------------------------------------------------------


def some_of(known: Any) -> Any:
    """A flag that takes some of several names, or nothing for all of them."""
    text = f"Repeatable; one of: {'; '.join(known)}."
    return typer.Option(help=text, show_default="all", callback=one_of(known))


Family = Annotated[str, typer.Option(help="Architecture of the models.", callback=one_of(FAMILIES))]
"""A field of options."""


class Scenarios(Experiment[OptionsT]):
    """What came of mechanisms in scenarios: a table with `mechanism`, a case and its `outcome`.

    Attributes:
        case: column that names the scenario.
        looks: see `OutcomeMatrix`.
        shows: what the figure shows.
        try_out: from a cell and the family of the models to its row: what was tried, its `outcome`,
            and a `detail` of what is not right.
        seconds: that the quick options take.
    """

    case: ClassVar[str]
    looks: ClassVar[dict[str, tuple[str, str]]]
    shows: ClassVar[str]
    try_out: ClassVar[Callable[..., dict[str, str]]]
    seconds: ClassVar[float]

    def on(self, own: OwnModel) -> Planned[OptionsT]:
        if own.model_type not in FAMILIES:
            raise LeftOutError(f"it builds no small model of the type {own.model_type}")
        quick: Any = self.quick
        options = replace(quick, family=own.model_type, **self.on_own_model)
        return Planned(options, seconds=self.seconds, note=SMALL)

    on_own_model: ClassVar[dict[str, Any]] = {}
    """Options that are others than the quick ones on a model of the user's own."""

    @abstractmethod
    def cells(self, options: OptionsT) -> list[tuple[str, ...]]:
        """What to try out."""

    def measure(self, options: OptionsT, progress: Progress) -> Tables:
        """A table of all cells, which has the experiment's name."""
        chosen: Any = options
        cells = progress.track(self.cells(options), description=self.name)
        return {self.name: pd.DataFrame([self.try_out(*cell, chosen.family) for cell in cells])}

    def matrix(self, tables: Tables) -> OutcomeMatrix:
        return OutcomeMatrix.of(tables[self.name], self.case, self.looks)

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {self.name: self.matrix(tables).figure(self.shows)}
