"""What an open scope costs a decode step in which its press has nothing to do.

Milliseconds of one machine say little, so every claim is a ratio of times that were taken in turn:
in each round all conditions run once, each round begins with another one, and the ratio is taken
round by round. The median ratio is reported, with a 95% bootstrap interval over rounds.

Patches and kvpress are compared with hooks too; kvpress takes turns with the bare model and with
hooks in an interpreter of its own. All decode one cache, which a KnormPress has pruned: what
attention over heads of different lengths costs is another question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
from experiments.framework import shared
from experiments.framework.experiment import Claim, Contrast, Evidence, Experiment, Finding, Tables
from experiments.framework.frames import wide_table
from experiments.framework.intervals import METHOD, bracket, bracketed
from experiments.framework.options import Device, Dtype, at_least, several
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import press_label, ratio_figure
from experiments.framework.tables import ResultTable
from experiments.framework.timing import Array, Stopwatch, each_in_turn
from experiments.loading import short_name
from experiments.testbed import timed_models
from experiments.testbed.recipes import press_name
from experiments.testbed.timed_models import FULL, Condition, ModelSpec, Opens, random_llama
from experiments.testbed.with_kvpress import NAME, joined_by_kvpress, presses_of_kvpress
from press_core.errors import first_line

RATIO = 0.5
"""Share of the tokens that presses evict."""

_COUNTING = "DecodingPress"
"""A press that counts the steps in which it has nothing to do."""

_SETTLING = 3
"""Steps in a scope before the clock runs: the first are those of one that was just opened."""

_REPEATS = 4
"""Steps in a row, of which the quickest counts."""


@dataclass(frozen=True)
class Options:
    """What is measured, and how often."""

    model: Annotated[
        tuple[str, ...],
        several(str, "Shipped model, folder or hub id.", show_default="random Llamas"),
    ] = ()
    layers: Annotated[
        tuple[int, ...], several(int, "Layers of the random Llamas.", at_least(1))
    ] = (4, 28, 64)
    press: shared.Presses = (
        "KnormPress",  # needs no queries
        _COUNTING,  # counts every step, and is between its intervals
        "SnapKVPress",
    )
    context: shared.Tokens = 256
    rounds: shared.Rounds = 40
    compiled: Annotated[
        bool, typer.Option(help="Measure the first model with torch.compile too.")
    ] = True
    kvpress: shared.Kvpress = True
    dtype: Dtype = "float32"
    device: Device = "cpu"

    @property
    def specs(self) -> list[ModelSpec]:
        """The models: those given, or random ones of these many layers."""
        asked = [ModelSpec(short_name(name), name) for name in self.model]
        asked = asked or [random_llama(f"{n} layers", num_layers=n) for n in self.layers]
        return [spec._replace(dtype=self.dtype, device=self.device) for spec in asked]


# ---- taking times ------------------------------------------------------------------------------


class Steps:
    """Decode steps, each on a copy of the same pruned cache."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        ids = timed_models.random_context(model, 1, context)
        self.token, self.pruned = torch.ones_like(ids[:, :1]), DynamicCache()
        with torch.inference_mode(), hooks_impl.KnormPress(RATIO)(model):
            model.base_model(input_ids=ids, past_key_values=self.pruned)

    def seconds(self, run: Any, repeats: int = _REPEATS) -> float:
        """Of the quickest of a few steps of a model, or of a compiled one."""
        taken = []
        for _ in range(repeats):
            cache = deepcopy(self.pruned)  # a press may do more to it than add a token
            watch = Stopwatch(self.token.device)
            run(input_ids=self.token, past_key_values=cache)
            watch.lap()
            taken += watch.seconds()
        return min(taken)


@torch.inference_mode()
def times_in_turn(
    scopes: Mapping[Condition, Opens], steps: Steps, runs: Mapping[Condition, Any], **turns: Any
) -> dict[Condition, Array]:
    """Seconds per decode step of what each condition runs, one per round, in its scope."""

    def timed(condition: Condition) -> float:
        with scopes[condition]():
            steps.seconds(runs[condition], _SETTLING)
            return steps.seconds(runs[condition])

    return each_in_turn(list(scopes), timed, **turns)


@torch.inference_mode()
def compiled_times(
    model: PreTrainedModel, scope: Callable[..., Opens], asked: Any, steps: Steps, **turns: Any
) -> dict[Condition, Array]:
    """The same of a compiled copy of a model for each condition, on which its scope stays open."""
    many_graphs = torch._dynamo.config.patch(recompile_limit=256)  # one for each patched forward
    with ExitStack() as stack, many_graphs:
        compiled = {}
        for condition in asked:
            own = deepcopy(model)
            stack.enter_context(scope(condition, own)())
            compiled[condition] = torch.compile(own, dynamic=True)
            steps.seconds(compiled[condition], _SETTLING)
        return times_in_turn(dict.fromkeys(asked, nullcontext), steps, compiled, **turns)


def can_compile(device: str, progress: Progress) -> bool:
    """Whether `torch.compile` works here; says why not."""
    try:
        torch.compile(lambda x: x.sin() + 1, dynamic=True)(torch.ones(7, device=device))
    except Exception as error:
        shared.print_left_out(progress, "torch.compile", first_line(error))
        return False
    return True


def between_intervals(condition: Condition, model: PreTrainedModel, **asked: Any) -> Opens:
    """`scope_of`; of a press that prunes at intervals, one whose interval is not over."""
    opens: Any = timed_models.scope_of(condition, model, **asked)
    if condition.press != _COUNTING:
        return opens
    return partial(replace(opens.func, compression_interval=1 << 20), model)


def compare(times: Mapping[Condition, Array], **told: str) -> Iterator[dict[str, Any]]:
    """Every press against the bare model, and other mechanisms against hooks.

    Yields:
        What is `told`, `press`, `mechanism`, `baseline`; `ratio` the median over rounds, `low` and
        `high` its interval; `ms` and `baseline_ms` the median milliseconds, for context; `rounds`.
    """
    for condition, seconds in times.items():
        for baseline in (FULL, condition._replace(mechanism="hook")):
            if condition not in (FULL, baseline):
                yield (
                    {**told, "press": condition.press, "mechanism": condition.mechanism}
                    | {"baseline": baseline.mechanism}
                    | shared.median_of("ratio", seconds / times[baseline])
                    | {"ms": 1e3 * float(np.median(seconds))}
                    | {"baseline_ms": 1e3 * float(np.median(times[baseline]))}
                    | {"rounds": len(seconds)}
                )


def rows_of(
    options: Options,
    of_kvpress: Mapping[str, type[Any]] | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Rows of all models, of the first one with the last press compiled too: see `compare`.

    Args:
        of_kvpress: the presses of kvpress, which take the place of patches.
        advance: called after each round.

    Raises:
        PressError: if a model does not suit a press.
    """
    presses, other = [press_name(name) for name in options.press], "patch"
    if of_kvpress is not None:
        # kvpress's has something to do at once: the cache is longer than its target.
        presses, other = [name for name in presses if name != _COUNTING], NAME
    models = {spec.name: spec.load() for spec in options.specs}
    asked = timed_models.conditions(presses, [RATIO], ("hook", other))
    scope = partial(between_intervals, context=options.context, of_kvpress=of_kvpress)
    scopes = {name: {one: scope(one, model) for one in asked} for name, model in models.items()}
    turns = {"rounds": options.rounds, "advance": advance}
    for name, model in models.items():
        steps = Steps(model, options.context)
        times = times_in_turn(scopes[name], steps, dict.fromkeys(asked, model), **turns)
        yield from compare(times, model=name, phase="decode")
        if options.compiled and name == options.specs[0].name:
            times = compiled_times(model, scope, [FULL, *asked[-2:]], steps, **turns)
            yield from compare(times, model=name, phase="compiled")


def beside_kvpress(**options: Any) -> Iterator[dict[str, Any]]:
    """Rows of kvpress among others, in the interpreter that has it."""
    return rows_of(Options(**options), presses_of_kvpress())


# ---- reading the table -------------------------------------------------------------------------


_EAGER = f"phase == 'decode' and press != '{_COUNTING}'"
_PRESSED = "mechanism in ('hook', 'patch') and baseline == 'bare'"

_FINDINGS = {
    "decode": (
        f"{_EAGER} and mechanism == 'patch' and baseline == 'hook'",
        "With patches a decode step takes at most {} as long as with hooks {}.",
        "decode as fast with patches as with hooks",
    ),
    "bare": (
        f"{_EAGER} and {_PRESSED}",
        "With a press open, a decode step takes at most {} as long as without {}.",
        "leave a press open while decoding",
    ),
    "counting": (
        f"press == '{_COUNTING}' and {_PRESSED}",
        "With one that waits for the end of its interval, it takes at most {} as long {}.",
        "",
    ),
    "kvpress": (
        f"{_EAGER} and mechanism == 'kvpress' and baseline == 'bare'",
        "With a press of kvpress open, a decode step takes at most {} as long as without {}.",
        "",
    ),
    "compiled": (
        f"phase == 'compiled' and {_PRESSED}",
        "With a press open, a compiled decode step takes at most {} as long as without {}.",
        "",
    ),
}
"""By name: the rows of which the slowest is told, the sentence, the need."""


class Overhead(Experiment[Options]):
    """Decode time with a press open, by mechanism, against the bare model.

    How much slower is a decode step while a press is open that has nothing to do, by mechanism
    and depth of the model, eager and compiled?

    All conditions run once in each round, in changing order, and times are divided round by
    round; the median ratio is given with a 95% bootstrap interval. kvpress takes turns with the
    bare model in an interpreter of its own. The models are narrow, so that the cost of a
    mechanism shows; on a wider model or a GPU the same microseconds weigh less. All conditions
    decode from one cache, so what attention over a pruned cache saves is not in these times.
    Only the first model is compiled, with the last press: a deep one takes minutes.
    """

    name = "overhead"
    title = "What an open scope costs in time"
    evidence = Evidence.TIME
    full = Options()
    quick = Options(layers=(4, 28), rounds=24, compiled=False, kvpress=False)
    claims: ClassVar = {
        "decode": Claim(replace(quick, layers=(28,)), within=0.1),
        "bare": Claim(replace(quick, layers=(4,)), within=0.1),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        own.opened(("KnormPress",))  # which prunes the cache that is decoded
        presses, (context,) = own.opened(Options.press), own.at_most(Options.context)
        options = self.quick_on(own, press=presses, context=context, rounds=12)
        steps = 13 * (_SETTLING + _REPEATS) * (1 + 2 * len(presses))
        return Planned(options, tokens=2 * context, steps=steps, seconds=2)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """The rows of all models, see `compare`, with kvpress where it is installed."""
        compiled = options.compiled and can_compile(options.device, progress)
        options = replace(options, compiled=compiled)
        total = (len(options.specs) + compiled) * options.rounds
        advance = partial(progress.advance, progress.add_task(self.name, total=total))
        table = pd.DataFrame(rows_of(options, advance=advance))
        return {self.name: joined_by_kvpress(table, options, progress, __name__)}

    def findings(self, tables: Tables) -> list[Finding]:
        found = []
        for name, (query, sentence, need) in _FINDINGS.items():
            for row in tables["overhead"].query(query).nlargest(1, "ratio").to_dict("records"):
                times = f"**{row['ratio']:.2f}**{bracket(row['low'], row['high'])} times"
                text = sentence.format(times, f"({press_label(row['press'])}, {row['model']})")
                works: Any = "works" if row["ratio"] < 1.05 else "costs"
                found.append(Finding(name, text, need, works if need else None))
        return found

    def views(self, tables: Tables) -> list[ResultTable]:
        rows = tables["overhead"]
        rows = rows.assign(
            over=rows["mechanism"] + " / " + rows["baseline"], press=rows["press"].map(press_label)
        )
        cells = [bracketed(row, "ratio") for row in rows.to_dict("records")]
        note = f"Ratios of times of decode steps: medians, with {METHOD} over rounds."
        return [wide_table(note, rows, ["model", "phase", "press"], "over", cells)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        shown = tables["overhead"].query("baseline == 'bare'")
        shown = shown.assign(label=shown["press"].map(press_label) + ", " + shown["mechanism"])
        of_models: Any = shown.groupby(["model", "phase"], sort=False)
        panels = {f"{model}: {phase} step": rows for (model, phase), rows in of_models}
        label = (
            "Time of a decode step with an open scope over that of the bare model: medians with "
            f"{METHOD} over rounds"
        )
        return {self.name: ratio_figure(panels, label, "time / time of the bare model")}

    def contrasts(self, tables: Tables) -> list[Contrast]:
        rows = tables["overhead"].query(f"{_EAGER} and baseline == 'bare'")
        slowest = rows.groupby("mechanism", sort=False)["ratio"].max()
        bars: Any = slowest.rename({"hook": "hooks", "patch": "patches"}).to_dict()
        return [Contrast("Longest decode step with a press open, over none", bars)]


EXPERIMENT = Overhead()
