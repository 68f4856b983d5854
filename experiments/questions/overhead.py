"""What an open scope costs in time: both mechanisms, against nothing and against empty ones.

Milliseconds of one machine say little, so every claim is a ratio of times that were taken in turn:
in each round all conditions run once, each round begins with another one, and the ratio is taken
round by round. What is reported is the median ratio, with the interval that holds the true median
with 95% confidence (from the order statistics, whatever the distribution).

Baselines: the *bare* model; an *empty hook*, which is a pre-hook and a forward hook on every
attention module that do nothing; an *empty wrapper*, a `wrapt` wrapper around every attention
module's forward that does nothing. The empty ones are what a mechanism costs before it does
anything.

Phases: *prefill* of one context, where the press acts (at compression ratio 0 it does not score,
so that the mechanism alone is left); *decode*, single-token steps on one pruned cache that is the
same for all conditions, the bare model included; *enter* and *leave*, installing on all attention
modules of the model and taking off, against one bare decode step; *call*, one call of a module that
computes nothing.

Presses are at their usual settings (`experiments.testbed.recipes`). The cache that is decoded is one that a
KnormPress has pruned, whatever press is open: what attention over heads of different lengths costs
is another question.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import comb
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import typer
import wrapt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
from experiments.framework.experiment import Experiment, Tables
from experiments.framework.plots import (
    INK,
    MUTED,
    legend_outside,
    mechanism_colour,
    mechanism_marker,
    new_figure,
    press_label,
    style,
)
from experiments.framework.report import write_results
from experiments.framework.tables import markdown_table
from experiments.loading import load_model, short_name
from experiments.testbed.compare import Inputs
from experiments.testbed.families import build
from experiments.testbed.recipes import MECHANISMS, press_name, suited_pair
from press_core import Press, attention_sites
from press_core.methods.finch import Finch

PRESSES = ("KnormPress", "SnapKVPress")
"""What the study measures: one press that needs no queries, and one that does."""

NO_PRESS = "no press"
_EMPTY = {"hook": "empty hook", "patch": "empty wrapper"}
_DELIMITER = 0
"""In every context, for FinchPress: a token that the bare model knows too."""
_RANDOM = "random Llama, width 512"


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        context: tokens of the prefill.
        compression_ratio: share of them evicted, and missing from the cache that is decoded.
        prefill_rounds, decode_rounds, scope_rounds, call_rounds: rounds of each phase.
        prefill_repeats, repeats: runs of each condition in a round (of a prefill; of all else), of
            which the quickest counts.
    """

    context: int = 256
    compression_ratio: float = 0.5
    prefill_rounds: int = 20
    decode_rounds: int = 80
    scope_rounds: int = 100
    call_rounds: int = 100
    prefill_repeats: int = 2
    repeats: int = 4


class Condition(NamedTuple):
    """What is installed on the model while the clock runs."""

    mechanism: str
    press: str = NO_PRESS
    compression_ratio: float = 0.0


BARE, EMPTY_HOOK, EMPTY_WRAPPER = (
    Condition(mechanism) for mechanism in ("bare", "empty hook", "empty wrapper")
)

Times = dict[Condition, "np.ndarray[Any, Any]"]
"""Seconds, one per round."""

Scopes = Mapping[Condition, Callable[[], AbstractContextManager[Any]]]
"""What each condition opens."""


# ---- the mechanisms without a press ------------------------------------------------------------


class EmptyHooks:
    """A pre-hook and a forward hook that do nothing on every one of `modules`, while open."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for module in self.modules:
            self.handles.append(module.register_forward_pre_hook(_nothing, with_kwargs=True))
            self.handles.append(module.register_forward_hook(_nothing, with_kwargs=True))

    def __exit__(self, *_: object) -> None:
        while self.handles:
            self.handles.pop().remove()


class EmptyWrappers:
    """A wrapper that does nothing around the forward of every one of `modules`, while open."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules

    def __enter__(self) -> None:
        for module in self.modules:
            module.__dict__["forward"] = wrapt.FunctionWrapper(module.forward, _pass_through)

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            del module.__dict__["forward"]


def _nothing(*_: Any) -> None:
    return None


def _pass_through(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(*args, **kwargs)


def scopes(
    model: PreTrainedModel,
    size: Size,
    compression_ratios: Sequence[float],
    presses: Sequence[str] = PRESSES,
) -> Scopes:
    """The bare model, the empty mechanisms, and every press with both mechanisms.

    Args:
        presses: names of any presses.
    """
    modules = [site.module for site in attention_sites(model)]
    opened: dict[Condition, Callable[[], AbstractContextManager[Any]]] = {
        BARE: nullcontext,
        EMPTY_HOOK: partial(EmptyHooks, modules),
        EMPTY_WRAPPER: partial(EmptyWrappers, modules),
    }
    for name in presses:
        for ratio in compression_ratios:
            pair = suited_pair(name, ratio, size.context, model)
            for mechanism, press in zip(MECHANISMS, pair, strict=True):
                opened[Condition(mechanism, name, ratio)] = partial(_with_delimiter(press), model)
    return opened


def _with_delimiter(press: Press) -> Press:
    return replace(press, delimiter_token_id=_DELIMITER) if isinstance(press, Finch) else press


# ---- taking times ------------------------------------------------------------------------------


def in_turn(
    scopes: Scopes,
    run: Callable[[], None],
    *,
    rounds: int,
    repeats: int = 1,
    prepare: Callable[[], None] = _nothing,
    advance: Callable[[], None] = _nothing,
) -> Times:
    """Time `run` inside every scope, in turn.

    Args:
        rounds: how often; one round more goes before them and is not counted.
        repeats: runs in a row, of which the quickest counts: the others were interrupted.
        prepare: called before each `run`, inside the scope, and not timed.
        advance: called after each round.

    Returns:
        Per condition `(rounds,)` seconds.
    """

    def timed_once() -> float:
        prepare()
        start = perf_counter()
        run()
        return perf_counter() - start

    def timed(condition: Condition) -> float:
        with scopes[condition]():
            return min(timed_once() for _ in range(repeats))

    return _rounds(list(scopes), rounds, timed, advance)


def opening_in_turn(
    scopes: Scopes,
    unit: Callable[[], None],
    *,
    rounds: int,
    prepare: Callable[[], None] = _nothing,
    advance: Callable[[], None] = _nothing,
) -> tuple[Times, Times]:
    """Time entering and leaving every scope, in turn; as `in_turn`.

    Args:
        unit: what is timed in place of `BARE`, which has nothing to enter; `prepare` goes before.

    Returns:
        Seconds to enter, and seconds to leave.
    """

    def timed(condition: Condition) -> tuple[float, float]:
        scope = scopes[condition]()
        if condition == BARE:
            prepare()
        start = perf_counter()
        unit() if condition == BARE else scope.__enter__()
        entered = perf_counter()
        if condition == BARE:
            return entered - start, entered - start
        scope.__exit__(None, None, None)
        return entered - start, perf_counter() - entered

    both = _rounds(list(scopes), rounds, timed, advance)
    enter, leave = ({name: pair[:, i] for name, pair in both.items()} for i in (0, 1))
    return enter, leave


def _rounds(
    names: list[Condition],
    rounds: int,
    timed: Callable[[Condition], Any],
    advance: Callable[[], None],
) -> Times:
    taken: dict[Condition, list[Any]] = {name: [] for name in names}
    with _no_garbage_collection():
        for index in range(rounds + 1):
            first = index % len(names)  # who begins changes, so that none always follows the same
            for name in names[first:] + names[:first]:
                taken[name].append(timed(name))
            if index:
                advance()
    return {name: np.array(times[1:]) for name, times in taken.items()}


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def median_interval(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """The interval between two order statistics that holds the median with 95% confidence.

    With fewer than six values there is none that narrow, and their range is given.
    """
    ordered = np.sort(values)
    n = len(ordered)
    below = np.cumsum([_binomial_half(n, k) for k in range(n + 1)])  # P(at most k below the median)
    skip = int(np.searchsorted(below, 0.025, side="right"))
    return float(ordered[max(skip - 1, 0)]), float(ordered[min(n - skip, n - 1)])


def _binomial_half(n: int, k: int) -> float:
    return comb(n, k) / 2**n


# ---- phases ------------------------------------------------------------------------------------


@torch.inference_mode()
def prefill_times(
    model: PreTrainedModel,
    size: Size,
    presses: Sequence[str] = PRESSES,
    advance: Callable[[], None] = _nothing,
) -> Times:
    """Seconds per prefill of `size.context` tokens: see `in_turn`.

    Presses run twice: at `size.compression_ratio`, and at 0, where they install all they install,
    collect what they collect, and evict nothing.
    """
    input_ids = _context(model, size)

    def run() -> None:
        model.base_model(input_ids=input_ids, past_key_values=DynamicCache())
        _wait(model)

    opened = scopes(model, size, (size.compression_ratio, 0.0), presses)
    return in_turn(
        opened, run, rounds=size.prefill_rounds, repeats=size.prefill_repeats, advance=advance
    )


@torch.inference_mode()
def decode_times(
    model: PreTrainedModel,
    size: Size,
    presses: Sequence[str] = PRESSES,
    advance: Callable[[], None] = _nothing,
) -> Times:
    """Seconds per single-token step on a pruned cache, of one length for all conditions."""
    step, prepare = _decoding(model, size)
    return in_turn(
        scopes(model, size, (size.compression_ratio,), presses),
        step,
        rounds=size.decode_rounds,
        repeats=size.repeats,
        prepare=prepare,
        advance=advance,
    )


@torch.inference_mode()
def opening_times(
    model: PreTrainedModel,
    size: Size,
    presses: Sequence[str] = PRESSES,
    advance: Callable[[], None] = _nothing,
) -> tuple[Times, Times]:
    """Seconds to enter and seconds to leave a scope; `BARE` is a decode step of the bare model."""
    step, prepare = _decoding(model, size)
    opened = scopes(model, size, (size.compression_ratio,), presses)
    return opening_in_turn(opened, step, rounds=size.scope_rounds, prepare=prepare, advance=advance)


def _decoding(model: PreTrainedModel, size: Size) -> tuple[Callable[[], None], Callable[[], None]]:
    """A decode step on a pruned cache, and what makes that cache anew."""
    pruned = DynamicCache()
    with hooks_impl.KnormPress(compression_ratio=size.compression_ratio)(model):
        model.base_model(input_ids=_context(model, size), past_key_values=pruned)
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    cache = pruned

    def step() -> None:
        model(input_ids=token, past_key_values=cache)
        _wait(model)

    def restore() -> None:
        nonlocal cache
        cache = deepcopy(pruned)  # a press may have done more to it than add a token

    return step, restore


def call_times(size: Size, calls: int = 500, advance: Callable[[], None] = _nothing) -> Times:
    """Seconds per call of a module that computes nothing, bare and with the empty mechanisms."""
    module = nn.Identity()
    argument = torch.zeros(1)

    def run() -> None:
        for _ in range(calls):
            module(argument)

    opened: Scopes = {
        BARE: nullcontext,
        EMPTY_HOOK: partial(EmptyHooks, [module]),
        EMPTY_WRAPPER: partial(EmptyWrappers, [module]),
    }
    times = in_turn(opened, run, rounds=size.call_rounds, repeats=size.repeats, advance=advance)
    return {condition: seconds / calls for condition, seconds in times.items()}


def _context(model: PreTrainedModel, size: Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = 1, size.context
    ids = torch.randint(1, model.config.vocab_size, shape, generator=generator)
    return Inputs(ids).with_delimiter(_DELIMITER, question=8).context.to(model.device)


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


# ---- tables ------------------------------------------------------------------------------------


def compare(times: Times, model: str, phase: str) -> pd.DataFrame:
    """Every condition against every baseline that it is compared with.

    Args:
        times: of the phase, from `prefill_times` and the like.

    Returns:
        Columns `model`, `phase`, `press`, `compression_ratio`, `mechanism`, `baseline`; `ratio` the
        median over rounds, `low` and `high` its 95% interval; `ms` and `baseline_ms` the median
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
    subjects: Mapping[str, PreTrainedModel],
    size: Size,
    presses: Sequence[str] = PRESSES,
    *,
    progress: bool = True,
) -> Tables:
    """All phases on all subjects.

    Args:
        subjects: models by the name that the table gives them.
        presses: names of any presses.
        progress: show a bar on stderr.

    Returns:
        `overhead`: see `compare`.
    """
    per_model = size.prefill_rounds + size.decode_rounds + size.scope_rounds
    total = len(subjects) * per_model + size.call_rounds
    parts = []
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("overhead", total=total)

        def advance() -> None:
            bar.advance(task)

        parts.append(compare(call_times(size, advance=advance), "empty module", "call"))
        for name, model in subjects.items():
            parts.append(compare(prefill_times(model, size, presses, advance), name, "prefill"))
            parts.append(compare(decode_times(model, size, presses, advance), name, "decode"))
            enter, leave = opening_times(model, size, presses, advance)
            parts += [compare(enter, name, "enter"), compare(leave, name, "leave")]
    return {"overhead": pd.concat(parts, ignore_index=True)}


def run() -> Tables:
    """The study: the shipped model, and a random one in which the mechanism weighs less."""
    model, _ = load_model("facts-llama")
    return measure({"facts-llama": model, _RANDOM: _random_llama()}, Size())


def _random_llama() -> PreTrainedModel:
    return build("llama", num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64)


# ---- reading the tables ------------------------------------------------------------------------


def figures(tables: Tables) -> dict[str, Figure]:
    """Times over those of the bare model: `overhead`, a row of panels per model."""
    overhead = tables["overhead"]
    shown = overhead[overhead["phase"].isin(_PHASES) & (overhead["baseline"] == "bare")]
    models = list(dict.fromkeys(shown["model"]))
    height = 0.7 + len(models) * (0.9 + 0.2 * len(_drawn(shown)))
    with style():
        figure, axes = new_figure(
            len(models), 2, width=8.6, height=height, sharey=True, sharex="col"
        )
        panels = [(model, phase) for model in models for phase in _PHASES]
        for panel, (model, phase) in zip(axes, panels, strict=True):
            rows = shown[(shown["model"] == model) & (shown["phase"] == phase)]
            _draw_panel(panel, rows, _drawn(shown))
            panel.set_title(f"{model}: {phase}")
        for panel in axes[-2:]:
            panel.set_xlabel("time / time of the bare model")
        legend_outside(figure, axes[0], handles=_legend(shown))
    return {"overhead": figure}


_PHASES = ("prefill", "decode")


def _drawn(overhead: pd.DataFrame) -> list[tuple[str, str]]:
    """Press and mechanism of each line of a panel."""
    return list(dict.fromkeys(zip(overhead["press"], overhead["mechanism"], strict=True)))


def _draw_panel(panel: Axes, rows: pd.DataFrame, names: list[tuple[str, str]]) -> None:
    panel.axvline(1, color=MUTED, linewidth=1)
    records: list[dict[Any, Any]] = rows.to_dict("records")
    for row in records:
        evicts = row["press"] == NO_PRESS or row["compression_ratio"] > 0
        colour = mechanism_colour(row["mechanism"])
        # What evicts nothing is drawn a little lower, as it belongs to the press above.
        y = names.index((row["press"], row["mechanism"])) + (0 if evicts else 0.28)
        panel.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=1.6)
        panel.plot(
            row["ratio"],
            y,
            color=colour,
            marker=mechanism_marker(row["mechanism"]),
            markerfacecolor=colour if evicts else "white",
        )
    labels = [m if p == NO_PRESS else f"{press_label(p)}, {m}" for p, m in names]
    panel.set_yticks(range(len(names)), labels)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")


def _legend(rows: pd.DataFrame) -> list[Line2D]:
    evicted = rows["compression_ratio"].max()
    look: dict[str, Any] = {"color": INK, "marker": "o", "linestyle": "none"}
    handles = [Line2D([], [], label=f"{evicted:.0%} evicted", **look)]
    handles.append(Line2D([], [], label="nothing evicted", markerfacecolor="white", **look))
    handles.append(Line2D([], [], color=INK, linewidth=1.6, label="95% interval"))
    return handles


def summary(tables: Tables) -> str:
    """What was measured, as Markdown."""
    overhead = tables["overhead"]
    lines = [
        sentence_on_decoding(overhead),
        "",
        "Ratios of times taken in turn: median over rounds, with its 95% interval.",
        "",
    ]
    pressed = overhead[overhead["phase"].isin(_PHASES) & (overhead["press"] != NO_PRESS)]
    keys = ["model", "phase", "press", "compression_ratio"]
    table = []
    for _, rows in pressed.groupby(keys, sort=False):
        cells = [_cell(rows, mechanism, baseline) for mechanism, baseline in _COLUMNS]
        table.append([*rows[["model", "phase"]].iloc[0], _label(rows), *cells])
    head = ["model", "phase", "press", *(f"{one} / {other}" for one, other in _COLUMNS)]
    lines.append(markdown_table(head, table, left=3))
    return "\n".join([*lines, "", sentence_on_opening(overhead), sentence_on_calls(overhead)])


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
    row = chosen.iloc[0]
    return f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def sentence_on_decoding(overhead: pd.DataFrame) -> str:
    """What an open scope does to the time of a decode step, over all models and presses."""
    steps = overhead[(overhead["phase"] == "decode") & (overhead["press"] != NO_PRESS)]
    ratios = steps.groupby(["mechanism", "baseline"])["ratio"].agg(["min", "max"])

    def span(mechanism: str, baseline: str) -> str:
        of_pair = ratios.xs((mechanism, baseline))
        return f"{of_pair['min']:.2f} to {of_pair['max']:.2f} times"

    return (
        f"With a scope open a decode step takes {span('hook', 'empty hook')} as long as with an "
        f"empty hook, and {span('patch', 'empty wrapper')} as long as with an empty wrapper; "
        f"patches take {span('patch', 'hook')} the time of hooks."
    )


def sentence_on_opening(overhead: pd.DataFrame) -> str:
    """What entering and leaving take, in decode steps of the bare model."""
    rows = overhead[(overhead["baseline"] == "bare") & (overhead["press"] != NO_PRESS)]
    model = rows["model"].iloc[0]
    of_model = rows[rows["model"] == model].groupby(["phase", "mechanism"])["ratio"].max()
    return (
        f"To enter a scope on `{model}` takes up to {of_model['enter', 'hook']:.2f} decode steps "
        f"with hooks and {of_model['enter', 'patch']:.2f} with patches, to leave it "
        f"{of_model['leave', 'hook']:.3f} and {of_model['leave', 'patch']:.3f}."
    )


def sentence_on_calls(overhead: pd.DataFrame) -> str:
    """What the empty mechanisms do to a call of an empty module."""
    calls = overhead[overhead["phase"] == "call"].set_index("mechanism")["ratio"]
    return (
        f"A call of a module that computes nothing takes {calls['empty hook']:.1f} times as long "
        f"with two empty hooks, and {calls['empty wrapper']:.1f} times with an empty wrapper."
    )


EXPERIMENT = Experiment(
    name="overhead",
    title="What an open scope costs in time",
    question="How much slower are prefill and decoding while a press is open, by mechanism, and "
    "how long does it take to open and close it?",
    run=run,
    figures=figures,
    summary=summary,
    repeat="python -m experiments overhead",
)


# ---- command -----------------------------------------------------------------------------------


def command(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Shipped model, folder or hub id; repeat it for several. By default facts-llama "
            "and a random Llama of width 512."
        ),
    ] = None,
    press: Annotated[
        list[str] | None,
        typer.Option(
            help="Press to measure, such as SnapKV; repeat it for several.",
            show_default=", ".join(map(press_label, PRESSES)),
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of the prefill.")] = Size.context,
    ratio: Annotated[
        float, typer.Option(help="Share of the tokens that presses evict, in (0, 1).")
    ] = Size.compression_ratio,
    prefill_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of the prefill.")
    ] = Size.prefill_rounds,
    decode_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of decoding, and of entering and leaving.")
    ] = Size.decode_rounds,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda.")] = "cpu",
    output: Annotated[
        Path | None, typer.Option(help="Folder to write the table and the figure to.")
    ] = None,
) -> None:
    """Prefill and decode time with a press open, by mechanism, against the bare model."""
    if not 0 < ratio < 1:
        raise typer.BadParameter(f"{ratio} is not above 0 and below 1", param_hint="--ratio")
    size = Size(context, ratio, prefill_rounds, decode_rounds, scope_rounds=decode_rounds)
    subjects = {short_name(name): load_model(name, device=device)[0] for name in model or ()}
    if not subjects:
        subjects["facts-llama"] = load_model("facts-llama", device=device)[0]
        subjects[_RANDOM] = _random_llama().to(device)
    names = list(map(press_name, press or PRESSES))
    for subject in subjects.values():
        for scope in scopes(subject, size, (ratio,), names).values():
            with scope():  # refuses a model that a press does not suit before anything is run
                pass
    tables = measure(subjects, size, names)
    _show(tables["overhead"])
    if output is not None:
        write_results(tables, figures(tables), output)


def _show(overhead: pd.DataFrame) -> None:
    console = Console()
    shown = overhead[overhead["phase"].isin(_PHASES)]
    for _, rows in shown.groupby(["model", "phase"], sort=False):
        first = rows.iloc[0]
        console.print(f"{first['phase'].capitalize()} with an open scope, {first['model']}")
        console.print(_rich_table(rows))
    console.print("Median of the ratio, with its 95% interval.")
    console.print(sentence_on_opening(overhead))
    console.print(sentence_on_calls(overhead))


def _rich_table(rows: pd.DataFrame) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("press", "mechanism"):
        table.add_column(heading, no_wrap=True)
    for heading in ("time / bare", "time / empty"):
        table.add_column(heading, no_wrap=True, justify="right")
    for _, own in rows.groupby(["press", "compression_ratio", "mechanism"], sort=False):
        mechanism = own["mechanism"].iloc[0]
        empty = _EMPTY.get(mechanism, "")
        cells = _cell(own, mechanism, "bare"), _cell(own, mechanism, empty)
        table.add_row(_label(own), mechanism, *cells)
    return table
