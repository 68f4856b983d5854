"""Speed and memory of a model with a press, and the longest context that fits.

*Speed*: prefill and decode times and memory, without a press and with each press and mechanism, in
turn, also compiled and with static caches; see `measuring`. *First token*: time to first token with
every press. *Fits*: the longest context within a memory limit, by bisection; see `measuring`.
*kvpress*: time spent inside presses, of this project and of kvpress.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from io import StringIO
from typing import Annotated, Any, ClassVar

import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.progress import Progress

import hooks_impl
from experiments import UserError
from experiments.framework import options as flags
from experiments.framework import shared
from experiments.framework.experiment import Claim, Evidence, Experiment, Finding, Tables
from experiments.framework.options import Device, Dtype, at_least, several
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.tables import ResultTable
from experiments.questions.throughput import reading
from experiments.questions.throughput.measuring import cache_bytes, longest, peak_of, speeds
from experiments.testbed import timed_models, with_kvpress
from experiments.testbed.recipes import press_name
from experiments.testbed.timed_models import FULL, Condition, ModelSpec, conditions, random_llama


class Part(str, Enum):
    """A part of the experiment."""

    SPEED = "speed"
    FIRST_TOKEN = "first-token"
    FITS = "fits"
    KVPRESS = "kvpress"


NARROW = random_llama("width 512", num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64)
DEEP = random_llama("16 layers", num_layers=16, num_heads=4, num_kv_heads=2, head_dim=64)
"""A model whose cache takes more memory than the activations of a layer, as in large models."""

PRESSES = ("SnapKVPress", "AdaKVPress")
"""Presses measured by default; the time to first token is measured for every press."""

INSIDE = (
    *("KnormPress", "StreamingLLMPress", "SnapKVPress", "TOVAPress", "ExpectedAttentionPress"),
    *("QFilterPress", "LagKVPress", "KeyDiffPress", "LeverageScorePress", "CompactorPress"),
    *("KVzapPress", "CriticalKVPress", "ChunkKVPress", "AdaKVPress", "DuoAttentionPress"),
    *("DecodingPress", "ThinKPress", "FinchPress"),
)
"""Presses timed against kvpress's, one for each kind of computation; `make oracle-timing` times all
of them, in half an hour."""


@dataclass(frozen=True)
class Options:
    """What to measure, at which sizes, and how often."""

    part: Annotated[
        tuple[Part, ...],
        typer.Option(help="What to measure.", show_default="all; speed if a model is given"),
    ] = ()
    model: shared.ModelOrOwn = None
    press: shared.Presses = ()
    context: Annotated[
        tuple[int, ...],
        several(int, "Tokens of a context; first-token takes the shortest.", at_least(32)),
    ] = (1024, 4096)
    batch: Annotated[tuple[int, ...], several(int, "Contexts at a time.", at_least(1))] = (2,)
    ratio: shared.Ratios = (0.8,)
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode after the first.")] = 16
    rounds: shared.Rounds = 6
    compiled: shared.Compiled = None  # the longest context
    memory: Annotated[bool, typer.Option(help="Also measure the peak memory of answers.")] = True
    kvpress: shared.Kvpress = True
    limit: Annotated[
        int | None,
        typer.Option(
            help="Memory for weights and the longest context, such as 8GiB.",
            parser=flags.n_bytes,
            show_default="128MiB",
        ),
    ] = None
    dtype: Dtype = "float32"
    device: Device = "auto"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The given parts; by default all, or for a given model speed, and fits with a limit."""
        of_model = (Part.SPEED, *([Part.FITS] if self.limit else []))
        return self.part or (tuple(Part) if self.model is None else of_model)

    @property
    def presses(self) -> list[str]:
        """Names of the given presses, or of `PRESSES`."""
        return [press_name(name) for name in self.press or PRESSES]

    def spec(self, random: ModelSpec) -> ModelSpec:
        """The given model, or a `random` one."""
        return ModelSpec.given(self.model, random, self.dtype, flags.chosen_device(self.device))


class Throughput(Experiment[Options]):
    """Measure time to first token, tokens per second, memory and the longest context that fits.

    How does a press change the time to first token, the tokens per second (also compiled, and with
    static caches), the memory and the longest context that fits?

    A context of random tokens is prefilled and tokens are decoded greedily, with the press open
    throughout. Conditions take turns, and each is divided by the model without a press in the same
    round; kvpress is timed and divided in its own interpreter, with an older transformers. Speed is
    quoted of the faster of the presses (by default SnapKV and AdaKV, with hooks) at the longest
    context, and what fits of a press with which most does. Presses are counted by their time to
    first token, with hooks, if they evict before it, and it counts as kept if by the upper ends of
    intervals more than half are within 1.10; bytes of up to 1.10 times what a ratio leaves count as
    freed. Time to first token begins when the scope is open. Time inside a press, of one for each
    kind of computation whatever `--press` says, is that of its hooks around two stand-in layers;
    where heads keep different tokens, kvpress evicts nothing in a prefill and masks in every later
    step, so the table also has rows with tokens decoded. Memory is the peak of a process beyond the
    loaded model, with a new process for each answer, or on a GPU the peak of torch's allocator; the
    longest context is bisected to within a sixteenth of it. The models are small: in a larger model
    the cache is a larger share of a decode step, so eviction saves more, and the press's own work
    is a smaller share. Tokens per second of one machine do not generalize; the ratios do so better.
    """

    name = "throughput"
    title = "Speed, memory and the longest context that fits"
    evidence = Evidence.TIME
    full = Options()
    quick = Options(
        part=(Part.SPEED, Part.FIRST_TOKEN),
        press=("SnapKVPress", "KnormPress"),
        context=(512,),
        batch=(1,),
        tokens=8,
        compiled=False,
        kvpress=False,
    )
    _once = Options((Part.SPEED,), context=(4096,), rounds=1, compiled=False, kvpress=False)
    claims: ClassVar = {"bytes": Claim(replace(_once, memory=False), within=0.01)}

    def on(self, own: OwnModel) -> Planned[Options]:
        (context,), presses = own.at_most(512), own.opened((*PRESSES, "KnormPress"))
        options = self.quick_on(own, press=presses, context=(context,))
        n_conditions = 1 + 2 * len(presses)
        n_answers = (n_conditions + 1 + len(presses)) * (options.rounds + 1)
        seconds = 10 * n_conditions  # peak memory takes a process per condition
        return Planned(options, n_answers * context, n_answers * options.tokens, seconds)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Measure the chosen parts.

        Returns:
            `throughput`: per model, way to run (`run`, `cache`), context, batch, press, mechanism
            and ratio: the time to first token `first` and the tokens per second `speed`, each over
            the model without a press (median over `rounds`, interval `_low` and `_high`); also
            `speed_over_kept`, over a context of only as many tokens as are kept, and
            `speed_over_hook`; `first_ms` and `tokens_per_s`; `bytes`, the size of the cache after
            the first token, `predicted`, its size by arithmetic, and `peak`, the peak memory beyond
            the model in bytes.
            `throughput_first`: the same columns for every press, with hooks.
            `throughput_fits`: by `press` and `ratio` the longest context, `measured` in tokens, of
            a `batch` that fits in `limit` bytes.
            `throughput_kvpress`: time inside presses and inside kvpress's, if it is
            installed; see `tests.oracle.timing.Row`.
        """
        alone = options.parts == (Part.KVPRESS,)
        if alone and not (options.kvpress and with_kvpress.python_with_kvpress()):
            raise UserError(
                "--part kvpress measures nothing without kvpress: leave out --no-kvpress, or let "
                "`make test` install it, or give another --part, too"
            )
        parts = [_PARTS[part] for part in options.parts]
        made = {name: make(options, progress) for name, make, *_ in parts}
        return {name: table for name, table in made.items() if table is not None}

    def findings(self, tables: Tables) -> list[Finding]:
        parts = [(tables[name], find) for name, _, find, _ in _PARTS.values() if name in tables]
        return [finding for table, find in parts for finding in find(table)]

    def views(self, tables: Tables) -> list[ResultTable]:
        parts = ((name, show) for name, *_, show in _PARTS.values() if show)
        return [show(tables[name]) for name, show in parts if name in tables]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {self.name: reading.draw_speeds(tables[self.name])} if self.name in tables else {}


EXPERIMENT = Throughput()


# ---- measuring -----------------------------------------------------------------------------------


def measure_speed(options: Options, progress: Progress) -> pd.DataFrame:
    """The table `throughput`.

    Raises:
        PressError: if the model does not support a press.
    """
    spec = options.spec(NARROW)
    options = timed_models.that_compile(options, progress)
    n_eager, ways = len(options.context) * len(options.batch), timed_models.ways(options, True)
    bar = progress.add_task("speed", total=(n_eager + len(ways) - 1) * options.rounds)
    rows = list(_speeds(options, ["hook", "patch"], advance=partial(progress.advance, bar)))
    model = spec.load()
    for row in progress.track(rows, description="memory"):
        condition = Condition(row["press"], row["mechanism"], row["ratio"])
        if (row["cache"], row["run"]) == timed_models.EAGER:
            row["predicted"] = cache_bytes(model, row["batch"] * row["context"], condition)
        if "predicted" in row and options.memory:
            row["peak"] = peak_of(spec, condition, row["context"], row["batch"], options.tokens)
            if row["peak"] is None:
                shared.print_left_out(progress, f"memory of {row['press']}", "its process ended")
    options = replace(options, device=spec.device)  # "auto" may differ in the other interpreter
    return with_kvpress.joined_by_kvpress(pd.DataFrame(rows), options, progress, __name__)


def _speeds(options: Options, mechanisms: list[str], **more: Any) -> Iterator[dict[str, Any]]:
    chosen = conditions(options.presses, options.ratio, mechanisms)
    chosen += [FULL._replace(ratio=ratio) for ratio in options.ratio]
    timing = options.tokens, options.rounds
    yield from speeds(options.spec(NARROW), chosen, options.context, options.batch, *timing, **more)
    sizes = [max(options.context)], [min(options.batch)]
    for way in timed_models.ways(options, graphs=True)[1:]:
        if with_kvpress.NAME not in mechanisms:  # its graphs break: `overhead` shows the cost
            yield from speeds(options.spec(NARROW), chosen, *sizes, *timing, way, **more)


def beside_kvpress(**options: Any) -> Iterator[dict[str, Any]]:
    """The rows with kvpress in them, for the interpreter in which it is installed."""
    presses = with_kvpress.presses_of_kvpress()
    return _speeds(Options(**options), ["hook", with_kvpress.NAME], of_kvpress=presses)


def measure_first(options: Options, progress: Progress) -> pd.DataFrame:
    """The table `throughput_first`: every press that the model supports, with hooks."""
    spec, context = options.spec(NARROW), min(options.context)
    model, opens = spec.load(), timed_models.scope_of
    presses = options.presses if options.press else sorted(hooks_impl.PRESSES)
    chosen = [
        condition
        for condition in conditions(presses, options.ratio, ["hook"])
        if shared.or_left_out(progress, condition.press, opens, condition, model, context)
    ]
    advance = partial(progress.advance, progress.add_task("first token", total=options.rounds))
    sizes = [context], [1], min(options.tokens, 8), options.rounds
    return pd.DataFrame(speeds(spec, chosen, *sizes, advance=advance))


def measure_fits(options: Options, progress: Progress) -> pd.DataFrame:
    """The table `throughput_fits`: the model without a press, and each press with hooks."""
    limit, spec = options.limit or 128 * 2**20, options.spec(DEEP)
    weights = sum(parameter.nbytes for parameter in spec.load().parameters())
    if weights >= limit:
        raise UserError(
            f"the weights of {spec.name} alone take {weights / 2**20:,.0f} MiB, but the limit is "
            f"{limit / 2**20:,.0f} MiB; give a larger --limit"
        )
    batch, rows = min(options.batch), []
    chosen = conditions(options.presses, options.ratio, ["hook"])
    for condition in progress.track(chosen, description="what fits"):
        measured = longest(spec, condition, limit - weights, batch, min(options.context))
        row = {"model": spec.name, "batch": batch, **condition._asdict()}
        rows.append(row | {"limit": limit, "measured": measured})
    return pd.DataFrame(rows)


def measure_kvpress(options: Options, progress: Progress) -> pd.DataFrame | None:
    """The table `throughput_kvpress`; None if kvpress is left out: see `of_kvpress`."""
    how = with_kvpress.output_of, "tests.oracle.timing", *INSIDE
    printed = with_kvpress.of_kvpress(options, progress, *how)
    return None if printed is None else pd.read_csv(StringIO(printed))


_PARTS: dict[Part, tuple[str, Callable[[Options, Progress], pd.DataFrame | None], Any, Any]] = {
    Part.SPEED: ("throughput", measure_speed, reading.on_speed, reading.show_speeds),
    Part.FIRST_TOKEN: ("throughput_first", measure_first, reading.on_first, None),
    Part.FITS: ("throughput_fits", measure_fits, reading.on_fits, reading.show_fits),
    Part.KVPRESS: ("throughput_kvpress", measure_kvpress, reading.on_kvpress, reading.show_kvpress),
}
"""The table of each part, and what measures it, draws findings from it and shows it to readers."""
