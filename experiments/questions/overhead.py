"""What an open scope costs in time: both mechanisms, against nothing and against empty ones.

Milliseconds of one machine say little, so every claim is a ratio of times that were taken in turn:
in each round all conditions run once, each round begins with another one, and the ratio is taken
round by round. The median ratio is reported, with a 95% bootstrap interval over rounds.

Baselines: the *bare* model; an *empty hook*, which is a pre-hook and a forward hook on every
attention module that do nothing; an *empty wrapper*, a `wrapt` wrapper around every attention
module's forward that does nothing. The empty ones are what a mechanism costs before it does
anything.

Phases: *prefill* of one context, of which presses evict nothing, so that they do not score and the
mechanism alone is left (what presses take is asked by `throughput`); *decode*, single-token steps
on one pruned cache that is the same for all conditions, the bare model included; *enter* and
*leave*, installing on all attention modules of the model and taking off, against one bare decode
step; *call*, one call of a module that computes nothing.

Presses are at their usual settings (`experiments.testbed.recipes`). The cache that is decoded is
one that a KnormPress has pruned, whatever press is open: what attention over heads of different
lengths costs is another question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import torch
import typer
import wrapt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Contrast, Experiment, Finding, Tables
from experiments.framework.intervals import METHOD, bracket, bracketed, median_interval
from experiments.framework.options import Device, Dtype, checked_positive_share
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import (
    MUTED,
    NO_PRESS,
    mechanism_colour,
    mechanism_marker,
    new_figure,
    press_label,
    style,
)
from experiments.framework.tables import ResultTable
from experiments.framework.timing import Array, each_in_turn, in_turn
from experiments.loading import load_model, short_name
from experiments.testbed.compare import Inputs
from experiments.testbed.families import build
from experiments.testbed.recipes import MECHANISMS, press_name, suited_pair, told_delimiter
from press_core import attention_sites

_EMPTY = {"hook": "empty hook", "patch": "empty wrapper"}
_DELIMITER = 0
"""In every context, for FinchPress: a token that the bare model knows too."""
_RANDOM = "random Llama, width 512"


@dataclass(frozen=True)
class Options:
    """What is measured, and how often."""

    model: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Shipped model, folder or hub id; repeat it for several.",
            show_default="facts-llama, and a random Llama of width 512",
        ),
    ] = ()
    press: Annotated[
        tuple[str, ...],
        typer.Option(help="Press to measure, such as SnapKV; repeat it for several."),
    ] = ("KnormPress", "SnapKVPress")  # one that needs no queries, and one that does
    context: Annotated[int, typer.Option(min=2, help="Tokens of the prefill.")] = 256
    ratio: Annotated[
        float,
        typer.Option(
            help="Share of the tokens that presses evict, in (0, 1).",
            callback=checked_positive_share,
        ),
    ] = 0.5
    prefill_rounds: Annotated[int, typer.Option(min=1, help="Rounds of the prefill.")] = 20
    decode_rounds: Annotated[int, typer.Option(min=1, help="Rounds of decoding.")] = 80
    scope_rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Rounds of entering and leaving, and of calls that compute nothing."
        ),
    ] = 100
    prefill_repeats: Annotated[
        int, typer.Option(min=1, help="Prefills in a row, of which the quickest counts.")
    ] = 2
    repeats: Annotated[
        int, typer.Option(min=1, help="Decode steps in a row, of which the quickest counts.")
    ] = 4
    dtype: Dtype = "float32"
    device: Device = "cpu"


class Condition(NamedTuple):
    """What is installed on the model while the clock runs."""

    mechanism: str
    press: str = NO_PRESS
    compression_ratio: float = 0.0


BARE, EMPTY_HOOK, EMPTY_WRAPPER = (
    Condition(mechanism) for mechanism in ("bare", "empty hook", "empty wrapper")
)

Times = dict[Condition, Array]
"""Seconds, one per round."""

Scopes = Mapping[Condition, Callable[[], AbstractContextManager[Any]]]
"""What each condition opens."""

Advance = Callable[[], object]
"""Called after each round."""


# ---- what is open ------------------------------------------------------------------------------


@contextmanager
def empty_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A pre-hook and a forward hook that do nothing on every one of `modules`, while open."""
    with ExitStack() as handles:
        for module in modules:
            before = module.register_forward_pre_hook(_nothing, with_kwargs=True)
            after = module.register_forward_hook(_nothing, with_kwargs=True)
            handles.callback(before.remove)
            handles.callback(after.remove)
        yield


@contextmanager
def empty_wrappers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A wrapper that does nothing around the forward of every one of `modules`, while open."""
    for module in modules:
        module.__dict__["forward"] = wrapt.FunctionWrapper(module.forward, _pass_through)
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["forward"]


def _nothing(*_: Any) -> None:
    return None


def _pass_through(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(*args, **kwargs)


def scopes(model: PreTrainedModel, options: Options, ratios: Sequence[float]) -> Scopes:
    """The bare model, the empty mechanisms, and every press with both mechanisms.

    Args:
        ratios: that the presses evict.
    """
    modules = [site.module for site in attention_sites(model)]
    opened: dict[Condition, Callable[[], AbstractContextManager[Any]]] = {
        BARE: nullcontext,
        EMPTY_HOOK: partial(empty_hooks, modules),
        EMPTY_WRAPPER: partial(empty_wrappers, modules),
    }
    for name in map(press_name, options.press):
        for ratio in ratios:
            pair = suited_pair(name, ratio, options.context, model)
            for mechanism, press in zip(MECHANISMS, pair, strict=True):
                opened[Condition(mechanism, name, ratio)] = partial(
                    told_delimiter(press, _DELIMITER), model
                )
    return opened


# ---- phases ------------------------------------------------------------------------------------


@torch.inference_mode()
def prefill_times(model: PreTrainedModel, options: Options, advance: Advance = _nothing) -> Times:
    """Seconds per prefill of `options.context` tokens.

    Presses install all they install, collect what they collect, and evict nothing.
    """
    input_ids = _context(model, options)

    def run() -> None:
        model.base_model(input_ids=input_ids, past_key_values=DynamicCache())
        _wait(model)

    opened = scopes(model, options, (0.0,))
    rounds, repeats = options.prefill_rounds, options.prefill_repeats
    return in_turn(opened, run, rounds=rounds, repeats=repeats, advance=advance)


@torch.inference_mode()
def decode_times(model: PreTrainedModel, options: Options, advance: Advance = _nothing) -> Times:
    """Seconds per single-token step on a pruned cache, of one length for all conditions."""
    step, prepare = _decoding(model, options)
    return in_turn(
        scopes(model, options, (options.ratio,)),
        step,
        rounds=options.decode_rounds,
        repeats=options.repeats,
        prepare=prepare,
        advance=advance,
    )


@torch.inference_mode()
def opening_times(
    model: PreTrainedModel, options: Options, advance: Advance = _nothing
) -> tuple[Times, Times]:
    """Seconds to enter and seconds to leave a scope; `BARE` is a decode step of the bare model."""
    step, prepare = _decoding(model, options)
    opened = scopes(model, options, (options.ratio,))
    rounds = options.scope_rounds
    return opening_in_turn(opened, step, rounds=rounds, prepare=prepare, advance=advance)


def opening_in_turn(
    scopes: Scopes,
    unit: Callable[[], None],
    *,
    rounds: int,
    prepare: Callable[[], None] = _nothing,
    advance: Advance = _nothing,
) -> tuple[Times, Times]:
    """Time entering and leaving every scope, in turn.

    Args:
        unit: what is timed in place of `BARE`, which has nothing to enter; `prepare` goes before.

    Returns:
        Seconds to enter, and seconds to leave.
    """

    def timed(condition: Condition) -> tuple[float, float]:
        if condition == BARE:
            prepare()
            start = perf_counter()
            unit()
            return (perf_counter() - start,) * 2
        scope = scopes[condition]()
        start = perf_counter()
        scope.__enter__()
        entered = perf_counter()
        scope.__exit__(None, None, None)
        return entered - start, perf_counter() - entered

    both = each_in_turn(list(scopes), timed, rounds=rounds, advance=advance)
    enter, leave = ({name: pair[:, i] for name, pair in both.items()} for i in (0, 1))
    return enter, leave


def _decoding(
    model: PreTrainedModel, options: Options
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A decode step on a pruned cache, and what makes that cache anew."""
    pruned = DynamicCache()
    with hooks_impl.KnormPress(compression_ratio=options.ratio)(model):
        model.base_model(input_ids=_context(model, options), past_key_values=pruned)
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    cache = pruned

    def step() -> None:
        model(input_ids=token, past_key_values=cache)
        _wait(model)

    def restore() -> None:
        nonlocal cache
        cache = deepcopy(pruned)  # a press may have done more to it than add a token

    return step, restore


def call_times(rounds: int, repeats: int, advance: Advance = _nothing) -> Times:
    """Seconds per call of a module that computes nothing, bare and with the empty mechanisms."""
    module, argument, calls = nn.Identity(), torch.zeros(1), 500

    def run() -> None:
        for _ in range(calls):
            module(argument)

    opened: Scopes = {
        BARE: nullcontext,
        EMPTY_HOOK: partial(empty_hooks, [module]),
        EMPTY_WRAPPER: partial(empty_wrappers, [module]),
    }
    times = in_turn(opened, run, rounds=rounds, repeats=repeats, advance=advance)
    return {condition: seconds / calls for condition, seconds in times.items()}


def _context(model: PreTrainedModel, options: Options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = 1, options.context
    ids = torch.randint(1, model.config.vocab_size, shape, generator=generator)
    return Inputs(ids).with_delimiter(_DELIMITER, question=8).context.to(model.device)


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


# ---- the table ---------------------------------------------------------------------------------


def compare(times: Times, model: str, phase: str) -> pd.DataFrame:
    """Every condition against every baseline that it is compared with.

    Args:
        times: of the phase, from `prefill_times` and the like.

    Returns:
        Columns `model`, `phase`, `press`, `compression_ratio`, `mechanism`, `baseline`; `ratio` the
        median over rounds, `low` and `high` its interval; `ms` and `baseline_ms` the median
        milliseconds, for context; `rounds`.
    """
    rows = []
    for condition, seconds in times.items():
        for baseline in _baselines(condition, list(times), phase):
            ratios = seconds / times[baseline]
            low, high = median_interval(ratios)
            rows.append(
                {"model": model, "phase": phase, "press": condition.press}
                | {"compression_ratio": condition.compression_ratio}
                | {"mechanism": condition.mechanism, "baseline": baseline.mechanism}
                | {"ratio": float(np.median(ratios)), "low": low, "high": high}
                | {"ms": 1e3 * float(np.median(seconds))}
                | {"baseline_ms": 1e3 * float(np.median(times[baseline]))}
                | {"rounds": len(ratios)}
            )
    return pd.DataFrame(rows)


def _baselines(condition: Condition, measured: list[Condition], phase: str) -> list[Condition]:
    """The bare model, the empty mechanism, and for a patch the same press as a hook."""
    if condition == BARE:
        return []
    wanted = [BARE]
    if condition.mechanism in _EMPTY and phase in ("prefill", "decode"):
        wanted.append(Condition(_EMPTY[condition.mechanism]))
    if condition.mechanism == "patch":
        wanted.append(condition._replace(mechanism="hook"))
    return [baseline for baseline in wanted if baseline in measured]


def measure(
    subjects: Mapping[str, PreTrainedModel], options: Options, progress: Progress
) -> pd.DataFrame:
    """All phases on all subjects: see `compare`.

    Args:
        subjects: models by the name that the table gives them.
    """
    per_model = options.prefill_rounds + options.decode_rounds + options.scope_rounds
    task = progress.add_task("", total=len(subjects) * per_model + options.scope_rounds)

    def advance() -> None:
        progress.advance(task)

    def tell(what: str) -> None:
        progress.update(task, description=what)

    tell("empty module")
    calls = call_times(options.scope_rounds, options.repeats, advance)
    parts = [compare(calls, "empty module", "call")]
    for name, model in subjects.items():
        tell(name)
        parts.append(compare(prefill_times(model, options, advance), name, "prefill"))
        parts.append(compare(decode_times(model, options, advance), name, "decode"))
        enter, leave = opening_times(model, options, advance)
        parts += [compare(enter, name, "enter"), compare(leave, name, "leave")]
    return pd.concat(parts, ignore_index=True)


def _subjects(options: Options) -> dict[str, PreTrainedModel]:
    """The models by name; by default a shipped one, and one in which the mechanism weighs less."""
    names = options.model or ("facts-llama",)
    where = {"dtype": options.dtype, "device": options.device}
    subjects = {short_name(n): load_model(n, **where)[0] for n in names}
    if not options.model:
        random = build("llama", num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64)
        subjects[_RANDOM] = random.to(torch.device(options.device), getattr(torch, options.dtype))
    return subjects


# ---- reading the table -------------------------------------------------------------------------


def _figure(overhead: pd.DataFrame, phase: str) -> Figure:
    """Times of a phase over those of the bare model, a panel per model."""
    shown = overhead[(overhead["phase"] == phase) & (overhead["baseline"] == "bare")]
    names = list(dict.fromkeys(zip(shown["press"], shown["mechanism"], strict=True)))
    models = list(dict.fromkeys(shown["model"]))
    height = 0.5 + len(models) * (0.5 + 0.22 * len(names))
    figure, axes = new_figure(len(models), width=5.2, height=height, sharex=True)
    with style():
        for panel, model in zip(axes, models, strict=True):
            _draw_panel(panel, shown[shown["model"] == model], names)
            panel.set_title(f"{model}: {phase}")
        axes[-1].set_xlabel("time / time of the bare model")
    evicted = shown["compression_ratio"].max()
    figure.set_label(
        f"Time of a {phase}{' step' if phase == 'decode' else ''} with an open scope over that of "
        f"the bare model: medians with {METHOD} over rounds, {evicted:.0%} evicted"
    )
    return figure


_PHASES = ("decode", "prefill")


def _draw_panel(panel: Axes, rows: pd.DataFrame, names: list[tuple[str, str]]) -> None:
    panel.axvline(1, color=MUTED, linewidth=1)
    ends = {"low": rows["ratio"], "high": rows["ratio"]}  # where there is no interval
    records: list[dict[Any, Any]] = rows.fillna(ends).to_dict("records")
    for row in records:
        colour, marker = mechanism_colour(row["mechanism"]), mechanism_marker(row["mechanism"])
        y = names.index((row["press"], row["mechanism"]))
        panel.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=1.6)
        panel.plot(row["ratio"], y, color=colour, marker=marker)
        panel.annotate(
            f"{row['ratio']:.2f}",
            (row["high"], y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=MUTED,
        )
    labels = [m if p == NO_PRESS else f"{press_label(p)}, {m}" for p, m in names]
    panel.set_yticks(range(len(names)), labels)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")


_COLUMNS = (
    ("hook", "bare"),
    ("patch", "bare"),
    ("hook", "empty hook"),
    ("patch", "empty wrapper"),
    ("patch", "hook"),
)


def _label(rows: pd.DataFrame) -> str:
    """What tables call the press of `rows`, all of one condition."""
    first = rows.iloc[0]
    if first["press"] == NO_PRESS:
        return NO_PRESS
    return f"{press_label(first['press'])}, {first['compression_ratio']:.0%} evicted"


def _cell(rows: pd.DataFrame, mechanism: str, baseline: str) -> str:
    chosen = rows[(rows["mechanism"] == mechanism) & (rows["baseline"] == baseline)]
    if chosen.empty:
        return ""
    return bracketed(chosen.iloc[0], "ratio")


def _pressed(overhead: pd.DataFrame, phase: str, mechanism: str, baseline: str) -> pd.DataFrame:
    """Rows of all models and presses in a phase."""
    rows = overhead[(overhead["phase"] == phase) & (overhead["press"] != NO_PRESS)]
    return rows[(rows["mechanism"] == mechanism) & (rows["baseline"] == baseline)]


def _range(rows: pd.DataFrame) -> str:
    return f"{rows['ratio'].min():.2f} to {rows['ratio'].max():.2f}"


def _slowest(rows: pd.DataFrame) -> Any:
    return rows.sort_values("ratio").iloc[-1]


def _times(row: Any) -> str:
    """A ratio in bold, and its interval."""
    return f"**{row['ratio']:.2f}**{bracket(row['low'], row['high'])} times"


def _where(row: Any) -> str:
    return f"({press_label(row['press'])}, {row['model']})"


class Overhead(Experiment[Options]):
    """Prefill and decode time with a press open, by mechanism, against the bare model."""

    name = "overhead"
    title = "What an open scope costs in time"
    question = (
        "How much slower are prefill and decoding while a press is open, by mechanism, and how "
        "long does it take to open and close it?"
    )
    method = (
        "All conditions run once in each round, in changing order, and times are divided round by "
        "round; the median ratio is given with a 95% bootstrap interval. Baselines are the bare "
        "model, and hooks and wrappers that do nothing. The models are small, so that the cost of "
        "a mechanism shows; on a larger model or a GPU the same microseconds weigh less. All "
        "conditions decode from one cache, so what attention over a pruned cache saves is not in "
        "these times."
    )
    evidence = Evidence.TIME
    full = Options()
    quick = Options(prefill_rounds=8, decode_rounds=24, scope_rounds=24, repeats=2)
    claims: ClassVar = {
        "decode": Claim(replace(quick, model=("facts-llama",)), within=0.1),
        "bare": Claim(replace(quick, model=("facts-llama",)), within=0.1),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        own.opened(("KnormPress",))  # which prunes the cache that is decoded
        presses, (context,) = own.opened(Options.press), own.at_most(Options.context)
        few = {"prefill_rounds": 6, "decode_rounds": 12, "scope_rounds": 12}
        once = {"prefill_repeats": 1, "repeats": 1}
        options = self.quick_on(own, press=presses, context=context, **few, **once)
        return Planned(
            options,
            tokens=context * 7 * (3 + 4 * len(presses)),
            steps=13 * (4 + 2 * len(presses)),
            seconds=2,
        )

    def measure(self, options: Options, progress: Progress) -> Tables:
        subjects = _subjects(options)
        for subject in subjects.values():
            for scope in scopes(subject, options, (options.ratio,)).values():
                with scope():  # refuses a model that a press does not suit before anything is run
                    pass
        return {"overhead": measure(subjects, options, progress)}

    def findings(self, tables: Tables) -> list[Finding]:
        overhead = tables["overhead"]
        step = _slowest(_pressed(overhead, "decode", "patch", "hook"))
        prefill = _slowest(_pressed(overhead, "prefill", "patch", "hook"))
        by_mechanism = [_pressed(overhead, "decode", name, "bare") for name in MECHANISMS]
        bare = _slowest(pd.concat(by_mechanism))
        return [
            Finding(
                "decode",
                f"With patches a decode step takes at most {_times(step)} as long as with hooks "
                f"{_where(step)}.",
                "decode as fast with patches as with hooks",
                "works" if step["ratio"] < 1.05 else "costs",
            ),
            Finding(
                "bare",
                f"With a press open, a decode step takes at most {_times(bare)} as long as "
                f"without {_where(bare)}.",
                "leave a press open while decoding",
                "costs",
            ),
            Finding(
                "prefill",
                f"A prefill that evicts nothing takes at most {_times(prefill)} as long with "
                f"patches as with hooks {_where(prefill)}.",
            ),
        ]

    def views(self, tables: Tables) -> list[ResultTable]:
        overhead = tables["overhead"]
        pressed = overhead[overhead["phase"].isin(_PHASES) & (overhead["press"] != NO_PRESS)]
        rows = []
        keys = ["model", "phase", "press", "compression_ratio"]
        for _, own in pressed.groupby(keys, sort=False):
            cells = [_cell(own, mechanism, baseline) for mechanism, baseline in _COLUMNS]
            rows.append([*own[["model", "phase"]].iloc[0], _label(own), *cells])
        head = ["model", "phase", "press", *(f"{one} / {other}" for one, other in _COLUMNS)]
        note = f"Ratios of times taken in turn: medians, with {METHOD} over rounds."
        return [ResultTable(note, head, rows, left=3)]

    def remarks(self, tables: Tables) -> list[str]:
        overhead = tables["overhead"]
        of_hook = _range(_pressed(overhead, "decode", "hook", "empty hook"))
        of_patch = _range(_pressed(overhead, "decode", "patch", "empty wrapper"))
        rows = overhead[(overhead["baseline"] == "bare") & (overhead["press"] != NO_PRESS)]
        model = rows["model"].iloc[0]
        opened = rows[rows["model"] == model].groupby(["phase", "mechanism"])["ratio"].max()
        calls = overhead[overhead["phase"] == "call"].set_index("mechanism")["ratio"]
        return [
            f"With a scope open a decode step takes {of_hook} times as long as with an empty hook, "
            f"and {of_patch} times as long as with an empty wrapper.",
            f"To enter a scope on `{model}` takes up to {opened['enter', 'hook']:.2f} decode steps "
            f"with hooks and {opened['enter', 'patch']:.2f} with patches, to leave it "
            f"{opened['leave', 'hook']:.3f} and {opened['leave', 'patch']:.3f}.",
            f"A call of a module that computes nothing takes {calls['empty hook']:.1f} times as "
            f"long with two empty hooks, and {calls['empty wrapper']:.1f} times with an empty "
            "wrapper.",
        ]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        names = ("overhead", "overhead_prefill")
        return {n: _figure(tables["overhead"], p) for n, p in zip(names, _PHASES, strict=True)}

    def contrasts(self, tables: Tables) -> list[Contrast]:
        bars = {
            name: float(_pressed(tables["overhead"], "decode", mechanism, "bare")["ratio"].max())
            for name, mechanism in (("hooks", "hook"), ("patches", "patch"))
        }
        return [Contrast("Longest decode step with a press open, over none", bars)]


EXPERIMENT = Overhead()
