"""How fast a model answers with a press, what memory it takes, and what fits.

*Speed and memory*: a context is read and tokens are decoded, without a press and with each press
and mechanism, in turn; see `speed` and `memory`. *First token*: every press.
*Fits*: the longest context and the largest batch within a limit of memory, by bisection, beside
what arithmetic says; see `memory`. *kvpress*: time inside presses, here and in kvpress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from io import StringIO
from typing import Annotated, Any, ClassVar

import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import PreTrainedModel

import hooks_impl
from experiments import UserError
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Experiment, Finding, Tables
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
from experiments.questions.throughput import reading
from experiments.questions.throughput.memory import (
    BATCH,
    CONTEXT,
    Arithmetic,
    Run,
    fitting_row,
    peak_of,
)
from experiments.questions.throughput.speed import speeds
from experiments.testbed.recipes import press_name
from experiments.testbed.timed_models import (
    Condition,
    ModelSpec,
    conditions,
    random_llama,
    scope_of,
)
from experiments.testbed.with_kvpress import (
    NAME,
    output_of,
    presses_of_kvpress,
    python_with_kvpress,
    rows_with_kvpress,
)
from press_core import PressError


class Part(str, Enum):
    """What there is to measure."""

    SPEED = "speed"
    FIRST_TOKEN = "first-token"
    FITS = "fits"
    KVPRESS = "kvpress"


NARROW = random_llama("width 512", num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64)
DEEP = random_llama("16 layers", num_layers=16, num_heads=4, num_kv_heads=2, head_dim=64)
"""Whose cache weighs more than what a layer computes with, as in large models."""

PRESSES = ("SnapKVPress", "AdaKVPress")
"""What is measured where nothing is said, but for the first token: that of every press."""

INSIDE = (
    *("KnormPress", "StreamingLLMPress", "SnapKVPress", "TOVAPress", "ExpectedAttentionPress"),
    *("QFilterPress", "LagKVPress", "KeyDiffPress", "LeverageScorePress", "CompactorPress"),
    *("KVzapPress", "CriticalKVPress", "ChunkKVPress", "AdaKVPress", "DuoAttentionPress"),
    *("DecodingPress", "ThinKPress", "FinchPress"),
)
"""Presses in which time is taken beside kvpress, one of each kind of arithmetic: all of them are
timed by `make oracle-timing`, in half an hour."""


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
    press: Annotated[
        tuple[str, ...],
        several(
            str,
            "Press to measure, such as SnapKV.",
            show_default="SnapKV and AdaKV; all of them for the first token",
        ),
    ] = ()
    context: Annotated[
        tuple[int, ...],
        several(int, "Tokens of a context; the first token: of the shortest.", at_least(32)),
    ] = (1024, 4096)
    batch: Annotated[tuple[int, ...], several(int, "Contexts at a time.", at_least(1))] = (2,)
    ratio: Annotated[
        tuple[float, ...],
        several(float, "Share of the tokens to evict, in (0, 1).", checked_positive_share),
    ] = (0.8,)
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode after the first.")] = 16
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take their turn.")] = 6
    memory: Annotated[bool, typer.Option(help="Measure the most memory of each answer too.")] = True
    kvpress: Annotated[
        bool, typer.Option(help="Measure kvpress beside it, where it is installed.")
    ] = True
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
    def presses(self) -> list[str]:
        """Names of presses, where not all of them are measured."""
        return [press_name(name) for name in self.press or PRESSES]

    def spec(self, random: ModelSpec) -> ModelSpec:
        """The model that is asked for, or a `random` one."""
        return ModelSpec.asked(self.model, random, self.dtype, chosen_device(self.device))


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
        "the same round, kvpress by that in its own interpreter. Memory is the most that a process "
        "takes beyond the loaded model, in a process of its own for each answer; of a GPU, what "
        "its allocator says. The models are small: in a larger one the cache is a larger share of "
        "a step, so that eviction saves more, and a press a smaller one. Tokens per second of one "
        "machine say little; ratios do."
    )
    evidence = Evidence.TIME
    full = Options()
    quick = Options(
        part=(Part.SPEED, Part.FIRST_TOKEN),
        press=("SnapKVPress", "KnormPress"),
        context=(512,),
        batch=(1,),
        tokens=8,
        kvpress=False,
    )
    claims: ClassVar = {
        "bytes": Claim(replace(quick, part=(Part.SPEED,), memory=False), within=0.05),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        (context,), presses = own.at_most(512), own.opened((*PRESSES, "KnormPress"))
        options = self.quick_on(own, press=presses, context=(context,))
        n_conditions = 1 + 2 * len(presses)
        n_answers = (n_conditions + 1 + len(presses)) * (options.rounds + 1)
        seconds = 10 * n_conditions  # a process each, for the memory
        return Planned(options, n_answers * context, n_answers * options.tokens, seconds)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Whichever parts are asked for.

        Returns:
            `throughput`: per model, context, batch, press, mechanism and ratio: `first` the time to
            the first token and `speed` the tokens per second, each over the model without a press
            (median over `rounds`, `_low` and `_high` its interval), of other mechanisms than
            hooks also `speed_over_hook`; `first_ms`, `tokens_per_s`; `bytes` that the cache holds
            after the first token, `predicted` ones, and `peak`, bytes beyond the model's at most.
            `throughput_first`: the same of every press, with hooks.
            `throughput_fits`: see `memory.fitting_row`.
            `throughput_kvpress`: time and memory inside presses and inside kvpress's, where that
            is installed; see `tests.oracle.timing.Row`.
        """
        tables: Tables = {}
        if Part.SPEED in options.parts:
            tables["throughput"] = measure_speed(options, progress)
        if Part.FIRST_TOKEN in options.parts:
            tables["throughput_first"] = measure_first(options, progress)
        if Part.FITS in options.parts:
            tables["throughput_fits"] = measure_fits(options, progress)
        python = python_with_kvpress() if options.kvpress else None
        if Part.KVPRESS in options.parts and python is not None:
            rows = output_of(python, "tests.oracle.timing", *INSIDE)
            tables["throughput_kvpress"] = pd.read_csv(StringIO(rows))
        return tables

    def findings(self, tables: Tables) -> list[Finding]:
        return [finding for name in tables for finding in reading.FINDINGS[name](tables[name])]

    def views(self, tables: Tables) -> list[ResultTable]:
        return [show(tables[name]) for name, show in reading.VIEWS.items() if name in tables]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {n: draw(tables[n]) for n, draw in reading.FIGURES.items() if n in tables}


EXPERIMENT = Throughput()


# ---- speed and memory ----------------------------------------------------------------------------


def rows_of(
    spec: ModelSpec,
    asked: Sequence[Condition],
    contexts: Sequence[int],
    batches: Sequence[int],
    tokens: int,
    rounds: int,
    of_kvpress: Mapping[str, type[Any]] | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Rows of `speeds` for every context and batch.

    Raises:
        PressError: if the model does not suit a press; before anything is measured.
    """
    model = spec.load()
    opened = {n: {one: scope_of(one, model, n, of_kvpress) for one in asked} for n in contexts}
    for context in contexts:
        for batch in batches:
            for row in speeds(model, opened[context], context, batch, tokens, rounds, advance):
                yield {"model": spec.name, **row}


def beside_kvpress(
    spec: list[Any], presses: list[str], ratios: list[float], **sizes: Any
) -> list[dict[str, Any]]:
    """Rows of kvpress, in the interpreter that has it."""
    asked = conditions(presses, ratios, ["hook", NAME])
    rows = rows_of(ModelSpec(*spec), asked, **sizes, of_kvpress=presses_of_kvpress())
    return [row for row in rows if row["mechanism"] == NAME]


def measure_speed(options: Options, progress: Progress) -> pd.DataFrame:
    """The table `throughput`.

    Raises:
        PressError: if the model does not suit a press.
    """
    spec = options.spec(NARROW)
    sizes: dict[str, Any] = {"contexts": options.context, "batches": options.batch}
    sizes |= {"tokens": options.tokens, "rounds": options.rounds}
    total = len(options.context) * len(options.batch) * options.rounds
    advance = partial(progress.advance, progress.add_task("speed", total=total))
    asked = conditions(options.presses, options.ratio)
    rows = list(rows_of(spec, asked, **sizes, advance=advance))
    arithmetic = _arithmetic(spec.load())
    for row in progress.track(rows, description="memory"):
        condition = Condition(row["press"], row["mechanism"], row["ratio"])
        if arithmetic is not None:
            row["predicted"] = arithmetic.cache_bytes(row["batch"] * row["context"], condition)
        if options.memory:
            run = Run(condition, row["context"], row["batch"], options.tokens)
            row["peak"] = peak_of(spec, run)
    table = pd.DataFrame(rows)
    python = python_with_kvpress() if options.kvpress else None
    if python is None:
        return table
    progress.add_task(NAME, total=None)
    of_presses: dict[str, Any] = {"presses": options.presses, "ratios": options.ratio}
    theirs = rows_with_kvpress(python, __name__, spec=spec, **of_presses, **sizes)
    return pd.concat([table, theirs], ignore_index=True)


def _arithmetic(model: PreTrainedModel) -> Arithmetic | None:
    """None for a model with sliding windows."""
    try:
        return Arithmetic.of(model)
    except UserError:
        return None


# ---- first token, and what fits ------------------------------------------------------------------


def measure_first(options: Options, progress: Progress) -> pd.DataFrame:
    """The table `throughput_first`: every press that a model suits, with hooks."""
    spec, context = options.spec(NARROW), min(options.context)
    model, rounds = spec.load(), options.rounds
    presses = options.presses if options.press else sorted(hooks_impl.PRESSES)
    opened = {}
    for condition in conditions(presses, options.ratio, ["hook"]):
        try:
            opened[condition] = scope_of(condition, model, context)
        except PressError as error:
            text = f"left out: {condition.press}: {error}"
            progress.console.print(text, style="yellow", markup=False)
    advance = partial(progress.advance, progress.add_task("first token", total=rounds))
    tokens = min(options.tokens, 8)
    table = pd.DataFrame(speeds(model, opened, context, 1, tokens, rounds, advance))
    table.insert(0, "model", spec.name)
    return table


def measure_fits(options: Options, progress: Progress) -> pd.DataFrame:
    """The table `throughput_fits`: without a press, and every press with hooks."""
    limit, spec = n_bytes(options.limit or "128MiB"), options.spec(DEEP)
    budget = Arithmetic.of(spec.load())
    if budget.weights >= limit:
        raise UserError(
            f"the weights of {spec.name} alone take {budget.weights / 2**20:,.0f} MiB, and the "
            f"limit is {limit / 2**20:,.0f} MiB; give a larger --limit"
        )
    asked = [
        (condition, limit, what, other)
        for what, other in ((CONTEXT, min(options.batch)), (BATCH, min(options.context)))
        for condition in conditions(options.presses, options.ratio, ["hook"])
    ]
    rows = [
        {"model": spec.name, **fitting_row(spec, budget, *one)}
        for one in progress.track(asked, description="what fits")
    ]
    return pd.DataFrame(rows)
