"""How fast a model answers with a press, what memory it takes, and what fits.

*Speed and memory*: a context is read and tokens are decoded, without a press and with each press
and mechanism, eager and compiled, in turn; see `speed` and `space`. *First token*: every press on
two random models. *Fits*: the longest context and the largest batch within a limit of memory, by
bisection, beside what arithmetic says; see `fits`. *kvpress*: time inside each press; see `beside`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import PreTrainedModel

import hooks_impl
from experiments import UserError
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Experiment, Finding, Related, Tables
from experiments.framework.options import (
    AutoDevice,
    Dtype,
    at_least,
    checked_positive_share,
    checked_size,
    chosen_device,
    n_bytes,
    several,
)
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.tables import ResultTable
from experiments.loading import short_name
from experiments.questions.throughput import beside, figures, views
from experiments.questions.throughput.cells import (
    Condition,
    Opens,
    Subject,
    conditions,
    scope_of,
)
from experiments.questions.throughput.findings import findings, related
from experiments.questions.throughput.fits import BATCH, CONTEXT, Budget, fitting_row
from experiments.questions.throughput.space import Run, peak_of
from experiments.questions.throughput.speed import Effort, speeds
from experiments.testbed.recipes import press_name
from press_core import PressError
from press_core.errors import first_line


class Part(str, Enum):
    """What there is to measure."""

    SPEED = "speed"
    FIRST_TOKEN = "first-token"
    FITS = "fits"
    KVPRESS = "kvpress"


def _llama(name: str, **shape: int) -> Subject:
    return Subject(name, shape=tuple(shape.items()))


NARROW = _llama("random Llama, width 512", num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64)
DEEP = _llama("random Llama, 16 layers", num_layers=16, num_heads=4, num_kv_heads=2, head_dim=64)
"""Whose cache weighs more than what a layer computes with, as in large models."""

LIKE_7B = _llama(
    "random Llama, cache of a 7B",
    **{"num_layers": 32, "num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "width": 64},
)
"""1 MiB a token in float32 and next to no weights, so that a CPU can fill gigabytes."""


@dataclass(frozen=True)
class Options:
    """What is measured, and how often."""

    part: Annotated[
        tuple[Part, ...],
        typer.Option(
            help="What to measure. Repeatable.",
            show_default="all; of a given model speed, and with --limit what fits",
        ),
    ] = ()
    model: Annotated[
        str | None,
        typer.Option(help="Shipped model, folder or hub id.", show_default="random Llamas"),
    ] = None
    press: Annotated[tuple[str, ...], several(str, "Press to measure, such as SnapKV.")] = (
        "SnapKVPress",
        "AdaKVPress",
    )
    context: Annotated[tuple[int, ...], several(int, "Tokens of a context.", at_least(32))] = (
        1024,
        4096,
    )
    batch: Annotated[tuple[int, ...], several(int, "Contexts at a time.", at_least(1))] = (2,)
    ratio: Annotated[
        tuple[float, ...],
        several(float, "Share of the tokens to evict, in (0, 1).", checked_positive_share),
    ] = (0.8,)
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode after the first.")] = 16
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take their turn.")] = 6
    compiled: Annotated[bool, typer.Option(help="Decode with torch.compile too.")] = False
    memory: Annotated[bool, typer.Option(help="Measure the most memory of each answer too.")] = True
    kvpress: Annotated[
        bool, typer.Option(help="Measure kvpress beside it, where it is installed.")
    ] = True
    every: Annotated[
        tuple[str, ...],
        several(str, "Press of the first-token part.", show_default="all of them"),
    ] = ()
    first_context: Annotated[
        int, typer.Option(min=64, help="Tokens of a context of the first-token part.")
    ] = 2048
    limit: Annotated[
        str | None,
        typer.Option(
            help="Memory in which contexts and batches are to fit, weights included, such as 8GiB: "
            "the longest context of the smallest --batch, the largest batch of the shortest "
            "--context.",
            callback=checked_size,
            show_default="128MiB",
        ),
    ] = None
    dtype: Dtype = "float32"
    device: AutoDevice = "auto"

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is measured where nothing is said."""
        if self.part or self.model is None:
            return self.part or tuple(Part)
        return (Part.SPEED, *([Part.FITS] if self.limit else []))

    @property
    def effort(self) -> Effort:
        """How often."""
        return Effort(self.tokens, self.rounds, self.rounds if self.compiled else 0)

    def subject(self, random: Subject) -> Subject:
        """The model that is asked for, or a `random` one."""
        device = chosen_device(self.device)
        if self.model is None:
            return Subject(random.name, None, random.shape, self.dtype, device)
        return Subject(short_name(self.model), self.model, (), self.dtype, device)


LIMIT, LARGE = "128MiB", 2**30
"""The limit if none is given, and the one from which on the model is `LIKE_7B` if none is given."""


class Throughput(Experiment[Options]):
    """Measure time to first token, tokens per second, memory and what fits, press by press."""

    name = "throughput"
    title = "How fast, how large, and what fits"
    question = (
        "With a press, how soon comes the first token, how fast the others, what memory does that "
        "take, and how long a context fits?"
    )
    method = (
        "A context of random tokens is read and tokens are decoded greedily, with the scope open "
        "all the while; conditions take turns, and each is divided by the model without a press of "
        "the same round. Memory is the most that a process takes beyond the loaded model, in a "
        "process of its own for each answer; of a GPU, what its allocator says. The models are "
        "small: in a larger one the cache is a larger share of a step, so that eviction saves "
        "more, and a press a smaller one. Tokens per second of one machine say little; ratios do."
    )
    evidence = Evidence.TIME
    full = Options()
    quick = Options(
        part=(Part.SPEED, Part.FIRST_TOKEN),
        press=("SnapKVPress",),
        context=(512,),
        batch=(1,),
        ratio=(0.8,),
        rounds=6,
        tokens=8,
        compiled=False,
        kvpress=False,
        every=("SnapKVPress", "KnormPress"),
        first_context=512,
    )
    claims: ClassVar = {
        "bytes": Claim(replace(quick, part=(Part.SPEED,), memory=False), within=0.05),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        (context,), presses = own.at_most(512), own.opened(Options.press)
        every = own.opened(self.quick.every)
        lengths: dict[str, Any] = {"context": (context,), "first_context": context}
        options = self.quick_on(own, press=presses, every=every, **lengths)
        n_conditions = 1 + 2 * len(presses)
        n_answers = (n_conditions + 1 + len(every)) * (options.rounds + 1)
        seconds = 10 * n_conditions  # a process each, for the memory
        return Planned(options, n_answers * context, n_answers * options.tokens, seconds)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Whichever parts are asked for.

        Returns:
            `throughput`: per model, context, batch, press, mechanism and ratio: `first` the time to
            the first token and `speed` the tokens per second, each over the model without a press
            (median over `rounds`, `_low` and `_high` its interval), of other mechanisms than
            hooks also `_over_hook`; `compiled`, tokens per second of the compiled model over those
            of the eager one; `first_ms`, `tokens_per_s`, `compiled_tokens_per_s`; `bytes` that the
            cache holds after the first token, `predicted` ones, and `peak`, bytes beyond the
            model's at most.
            `throughput_first`: the same of every press, with hooks.
            `throughput_fits`: see `fits.fitting_row`.
            `throughput_kvpress`: time and memory inside each press and inside kvpress's, where that
            is installed; see `tests.oracle.timing.Row`.
        """
        presses = [press_name(name) for name in options.press]
        every = [press_name(name) for name in options.every] or sorted(hooks_impl.PRESSES)
        tables: Tables = {}
        if Part.SPEED in options.parts:
            tables["throughput"] = measure_speed(options, presses, progress)
        if Part.FIRST_TOKEN in options.parts:
            tables["throughput_first"] = measure_first(options, every, progress)
        if Part.FITS in options.parts:
            tables["throughput_fits"] = measure_fits(options, presses, progress)
        python = beside.python_with_kvpress() if options.kvpress else None
        if Part.KVPRESS in options.parts and python is not None:
            tables["throughput_kvpress"] = beside.timed_presses(python)
        return tables

    def findings(self, tables: Tables) -> list[Finding]:
        return findings(tables)

    def related(self, tables: Tables) -> list[Related]:
        return related(tables)

    def views(self, tables: Tables) -> list[ResultTable]:
        return views.views(tables)

    def remarks(self, tables: Tables) -> list[str]:
        return views.remarks(tables)

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return figures.figures(tables)


EXPERIMENT = Throughput()


# ---- speed and memory ----------------------------------------------------------------------------


def measure_speed(options: Options, presses: list[str], progress: Progress) -> pd.DataFrame:
    """The table `throughput`.

    Raises:
        PressError: if the model does not suit a press.
    """
    subject = options.subject(NARROW)
    model, effort = subject.load(), options.effort
    asked = conditions(presses, options.ratio)
    if effort.compiled_rounds and (reason := cannot_compile(model.device)):
        progress.console.print(f"left out: torch.compile ({reason})", style="yellow", markup=False)
        effort = Effort(effort.tokens, effort.rounds)
    opened = {c: {k: scope_of(k, model, c) for k in asked} for c in options.context}
    grid = [(context, batch) for context in options.context for batch in options.batch]
    per_size = effort.rounds + (len(asked) if effort.compiled_rounds else 0)
    task = progress.add_task("speed", total=len(grid) * per_size)
    rows: list[dict[str, Any]] = []
    for context, batch in grid:
        advance = partial(progress.advance, task)
        for row in speeds(model, opened[context], context, batch, effort, advance):
            rows.append({"model": subject.name, **row})
    if options.memory:
        del model, opened
        for row in progress.track(rows, description="memory"):
            cell = Condition(row["press"], row["mechanism"], row["ratio"])
            row["peak"] = peak_of(subject, Run(cell, row["context"], row["batch"], effort.tokens))
    table = pd.DataFrame(rows)
    python = beside.python_with_kvpress() if options.kvpress else None
    if python is None:
        return table
    task = progress.add_task("kvpress", total=None)
    sizes = options.context, options.batch
    of_kvpress = beside.asked_of(subject, presses, list(options.ratio), sizes, effort)
    table = pd.concat([table, beside.rows_of_kvpress(python, of_kvpress)], ignore_index=True)
    progress.remove_task(task)
    return table


def cannot_compile(device: torch.device) -> str:
    """Why `torch.compile` does not work here, in a line; empty if it does."""
    try:
        torch.compile(lambda x: x.sin() + 1, dynamic=True)(torch.ones(7, device=device))
    except Exception as error:
        return first_line(error)
    return ""


# ---- first token ---------------------------------------------------------------------------------


def measure_first(options: Options, presses: list[str], progress: Progress) -> pd.DataFrame:
    """The table `throughput_first`: every press that a model suits, with hooks."""
    subject = options.subject(NARROW)
    model, effort = subject.load(), Effort(min(options.tokens, 8), options.rounds)
    asked = conditions(presses, options.ratio, ["hook"])
    opened = dict(_suiting(model, asked, options, progress))
    task = progress.add_task("first token", total=effort.rounds)
    advance = partial(progress.advance, task)
    rows = speeds(model, opened, options.first_context, 1, effort, advance)
    return pd.DataFrame([{"model": subject.name, **row} for row in rows])


def _suiting(
    model: PreTrainedModel, asked: list[Condition], options: Options, progress: Progress
) -> Iterator[tuple[Condition, Opens]]:
    for condition in asked:
        try:
            yield condition, scope_of(condition, model, options.first_context)
        except PressError as error:
            text = f"left out: {condition.press}: {error}"
            progress.console.print(text, style="yellow", markup=False)


# ---- what fits -----------------------------------------------------------------------------------


def measure_fits(options: Options, presses: list[str], progress: Progress) -> pd.DataFrame:
    """The table `throughput_fits`: without a press, and every press with hooks."""
    limit = n_bytes(options.limit or LIMIT)
    subject = options.subject(DEEP if limit < LARGE else LIKE_7B)
    budget = Budget.of(subject.load())
    if budget.weights >= limit:
        raise UserError(
            f"the weights of {subject.name} alone take {budget.weights / 2**20:,.0f} MiB, and the "
            f"limit is {limit / 2**20:,.0f} MiB; give a larger --limit"
        )
    asked = [
        (condition, what, other)
        for what, other in ((CONTEXT, min(options.batch)), (BATCH, min(options.context)))
        for condition in conditions(presses, options.ratio, ["hook"])
    ]
    rows = [
        {"model": subject.name, **fitting_row(subject, budget, condition, limit, what, other)}
        for condition, what, other in progress.track(asked, description="what fits")
    ]
    return pd.DataFrame(rows)
