"""Scenarios: a model runs while a mechanism is open or after it was closed, and is checked.

A scenario is a generator that opens and closes mechanisms, and yields the models to check between.
"""

import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor
from transformers import DynamicCache

from experiments.framework.experiment import Experiment, Tables
from experiments.framework.frames import OutcomeMatrix
from experiments.framework.options import one_of
from experiments.framework.own_model import SMALL, LeftOutError, OwnModel, Planned
from experiments.framework.wording import in_one_line
from experiments.mechanisms import contained
from experiments.testbed.compare import Response, random_tokens, states_of
from experiments.testbed.families import FAMILIES, build

OptionsT = TypeVar("OptionsT")

ERROR = "error"
"""The outcome of a scenario that raises an exception."""

CONTEXT, LENGTH = 24, 26
"""Number of tokens in the prefill, and in total with those of decode steps."""


@torch.no_grad()
def prefill(model: Any, cache: DynamicCache) -> list[Tensor]:
    return [model(random_tokens(LENGTH)[:, :CONTEXT], past_key_values=cache).logits]


@torch.no_grad()
def decoded(model: Any, cache: DynamicCache, before: Sequence[Tensor] = ()) -> Response:
    """Logits and cache after decode steps with the arguments that `generate` would pass."""
    logits = list(before)
    for i in range(CONTEXT, LENGTH):
        ids, position = random_tokens(LENGTH)[:, i : i + 1], torch.tensor([[i]])
        logits.append(model(ids, position_ids=position, past_key_values=cache).logits)
    seen = [int(layer.get_seq_length()) for layer in cache.layers]
    return Response(logits, states_of(cache), seen)


def answer(model: Any) -> Response:
    """A prefill and two steps on a new cache."""
    cache = DynamicCache(config=model.config)
    return decoded(model, cache, prefill(model, cache))


class Moment(NamedTuple):
    """A check in a scenario: a model to run, and the right response.

    Attributes:
        when: the moment of the scenario, in words.
        right: the right response.
        ask: runs the model and returns its response.
        tolerance: see `Response.difference`.
    """

    when: str
    right: Response
    ask: Callable[[], Response]
    tolerance: float = 0.0


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
    """An option that takes names among `known`; by default all of them."""
    text = f"Repeatable; one of: {'; '.join(known)}."
    return typer.Option(help=text, show_default="all", callback=one_of(known))


OF_FAMILY = typer.Option(help="Architecture of a small random model.", callback=one_of(FAMILIES))
Family = Annotated[str, OF_FAMILY]
"""A field of options."""


class Scenarios(Experiment[OptionsT]):
    """Experiments over scenarios; the table holds `mechanism`, a case and the `outcome`.

    Attributes:
        columns: names of the columns that identify a cell: mechanism, case, and further variables.
        looks: see `OutcomeMatrix`.
        shows: what the figure shows.
        seconds: approximate time that the quick options take.
    """

    columns: ClassVar[tuple[str, ...]]
    looks: ClassVar[dict[str, tuple[str, str]]]
    shows: ClassVar[str]
    seconds: ClassVar[float]

    def on(self, own: OwnModel) -> Planned[OptionsT]:
        if own.model_type not in FAMILIES:
            raise LeftOutError(f"it builds no small model of the type {own.model_type}")
        quick: Any = self.quick
        options = replace(quick, family=own.model_type, **self.on_own_model)
        return Planned(options, seconds=self.seconds, note=SMALL)

    on_own_model: ClassVar[dict[str, Any]] = {}
    """Options that replace quick ones in a study of the user's own model."""

    @abstractmethod
    def cells(self, options: OptionsT) -> list[tuple[str, ...]]:
        """The cells to run, each with a value for each of `columns`."""

    @abstractmethod
    def scenario(self, *cell: Any, **_: Any) -> Iterator[Moment]:
        """The scenario of a cell, with models of a family, which is the last argument."""

    @abstractmethod
    def wrong(self, when: str) -> str:
        """The outcome, one of `looks`, if the response at the moment `when` is wrong."""

    def outcome(self, scenario: Iterator[Moment], family: str) -> tuple[str, str]:
        """The worst outcome of a scenario, and a detail of what is wrong.

        Changes that the scenario leaves in the process are undone, as far as they affect models of
        `family`. Warnings of libraries about each other are not shown.
        """
        order = list(self.looks)
        found = [(order[0], "")]
        with contained(build(family)), _quiet():
            try:
                for moment in scenario:
                    found.append(self._outcome(moment))
            except Exception as error:  # an exception of any type is an outcome
                found.append((ERROR, in_one_line(error)))
        return max(found, key=lambda pair: order.index(pair[0]))

    def _outcome(self, moment: Moment) -> tuple[str, str]:
        try:
            difference = moment.right.difference(moment.ask(), moment.tolerance)
        except Exception as error:
            return ERROR, f"{moment.when}: {in_one_line(error)}"
        if not difference:
            return next(iter(self.looks)), ""
        return self.wrong(moment.when), f"{moment.when}: {difference}"

    def try_out(self, *cell: str, family: str = "llama") -> dict[str, str]:
        """A row of the table: the cell, its `outcome`, and a `detail` of what is wrong."""
        outcome, detail = self.outcome(self.scenario(*cell, family), family)
        return dict(zip(self.columns, cell, strict=True)) | {"outcome": outcome, "detail": detail}

    def measure(self, options: OptionsT, progress: Progress) -> Tables:
        """A table of all cells, named after the experiment."""
        chosen: Any = options
        cells = progress.track(self.cells(options), description=self.name)
        rows = [self.try_out(*cell, family=chosen.family) for cell in cells]
        return {self.name: pd.DataFrame(rows)}

    def matrix(self, tables: Tables) -> OutcomeMatrix:
        return OutcomeMatrix(tables[self.name], self.columns[1], self.looks)

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {self.name: self.matrix(tables).figure(self.shows)}
