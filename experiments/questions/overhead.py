"""How much an open scope slows a decode step in which its press does not prune.

Milliseconds on one machine do not generalize, so every finding is a ratio of interleaved times: in
each round all conditions run once, the first condition changes from round to round, and the ratio
is computed per round. The median ratio is reported, with a 95% bootstrap interval over rounds.

Patches and kvpress are also compared with hooks. kvpress is timed in a separate interpreter, where
the bare model and hooks are timed too. All conditions decode from the same cache, pruned by a
KnormPress, so the cost of attention over heads of different lengths is not included.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import PreTrainedModel

import hooks_impl
from experiments import data_of
from experiments.framework import shared
from experiments.framework.experiment import Claim, Contrast, Evidence, Experiment, Finding, Tables
from experiments.framework.frames import wide_table
from experiments.framework.intervals import METHOD, bracket, bracketed, median_of
from experiments.framework.options import Device, Dtype, at_least, several
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import press_label, ratio_figure
from experiments.framework.tables import ResultTable
from experiments.framework.timing import Array, Stopwatch, each_in_turn
from experiments.loading import short_name
from experiments.testbed import timed_models
from experiments.testbed.recipes import press_name
from experiments.testbed.timed_models import EAGER, FULL, Condition, ModelSpec, Opens, Way
from experiments.testbed.with_kvpress import NAME, joined_by_kvpress, presses_of_kvpress

RATIO = 0.5
"""Share of the tokens that presses evict."""

_COUNTING = "DecodingPress"
"""A press that counts every decode step and prunes only at the end of an interval."""

_SETTLING = 3
"""Warm-up steps in a scope before timing; the first steps after opening are slower."""

_REPEATS = {"eager": 4, "installed": 4, "compiled": 20}
"""Timed steps in a row, of which the fastest counts."""

_COMPILATIONS = 6
"""Rounds of a compiled model, which each compile it anew."""


@dataclass(frozen=True)
class Options:
    """Which models and presses to time, and how often."""

    model: Annotated[
        tuple[str, ...],
        several(str, "Shipped model, folder or hub id.", show_default="random Llamas"),
    ] = ()
    layers: Annotated[
        tuple[int, ...], several(int, "Layers of the random Llamas.", at_least(1))
    ] = (4, 28, 64)
    press: shared.Presses = (
        "KnormPress",  # needs no queries
        _COUNTING,  # counts every step, and is timed between its intervals
        "SnapKVPress",
    )
    context: shared.Tokens = 256
    rounds: shared.Rounds = 40
    compiled: shared.Compiled = None  # the first model
    kvpress: shared.Kvpress = True
    dtype: Dtype = "float32"
    device: Device = "cpu"

    @property
    def specs(self) -> list[ModelSpec]:
        """The given models, or random Llamas with these numbers of layers."""
        short = [*map(short_name, self.model)]
        names = short if len({*short}) == len(short) else self.model  # two may have one name
        chosen = [ModelSpec(*pair) for pair in zip(names, self.model, strict=True)]
        chosen = chosen or [
            timed_models.random_llama(f"{n} layers", num_layers=n) for n in self.layers
        ]
        return [spec._replace(dtype=self.dtype, device=self.device) for spec in chosen]

    @property
    def timed(self) -> list[tuple[str, Way, int]]:
        """Which model is timed in which way, in how many rounds: the first one in all ways."""
        names, rounds = [x.name for x in self.specs], {"compiled": min(self.rounds, _COMPILATIONS)}
        others = {names[0]: timed_models.ways(self)[1:]}
        return [
            (name, way, rounds.get(way.run, self.rounds))
            for name in names
            for way in (EAGER, timed_models.INSTALLED, *others.get(name, ()))
        ]


# ---- taking times ------------------------------------------------------------------------------


class Steps:
    """Decode steps, each on a copy of the same pruned cache."""

    def __init__(self, model: PreTrainedModel, context: int, way: Way = EAGER) -> None:
        ids = timed_models.random_context(model, 1, context)
        self.model, self.way = model, way
        self.token, self.pruned = torch.ones_like(ids[:, :1]), way.empty_cache(model, context + 8)
        with torch.inference_mode(), hooks_impl.KnormPress(RATIO)(model):
            model.base_model(input_ids=ids, past_key_values=self.pruned)

    def seconds(self, run: Any, repeats: int) -> float:
        """Seconds of the fastest of `repeats` decode steps of `run`, a model or a compiled one."""
        taken = []
        for _ in range(repeats):
            cache = deepcopy(self.pruned)  # the step adds a token, and a press may change more
            watch = Stopwatch(self.token.device)
            run(input_ids=self.token, past_key_values=cache)
            watch.lap()
            taken += watch.seconds()
        return min(taken)


@torch.inference_mode()
def times_in_turn(
    scopes: Mapping[Condition, Opens], steps: Steps, **turns: Any
) -> dict[Condition, Array]:
    """Seconds per decode step in the scope of each condition, one per round."""

    def timed(condition: Condition) -> float:
        with scopes[condition](), steps.way.running(steps.model) as run:
            steps.seconds(run, _SETTLING)
            return steps.seconds(run, _REPEATS[steps.way.run])

    return each_in_turn(list(scopes), timed, **turns)


def between_intervals(condition: Condition, model: PreTrainedModel, **settings: Any) -> Opens:
    """`scope_of`, with an interval of a press that prunes at intervals that never ends."""
    opens: Any = timed_models.scope_of(condition, model, **settings)
    if condition.press != _COUNTING:
        return opens
    return partial(replace(opens.func, compression_interval=1 << 20), model)


@contextmanager
def left_installed(opens: Opens) -> Iterator[None]:
    """Open a scope whose hooks or patches stay on the layers in steps that do not need them."""
    with opens() as scope:
        if state := getattr(scope, "state", None):  # else no press, or kvpress's, which stays
            state.on_layers.stay = True
        yield


def compare(times: Mapping[Condition, Array], **labels: str) -> Iterator[dict[str, Any]]:
    """Every press against the bare model, and other mechanisms against hooks.

    Yields:
        A row with the `labels`, `press`, `mechanism` and `baseline`; `ratio`, the median over
        rounds, its interval, `low` and `high`, and its `units`.
    """
    for condition, seconds in times.items():
        for baseline in (FULL, condition._replace(mechanism="hook")):
            if condition not in (FULL, baseline):
                yield (
                    {**labels, "press": condition.press, "mechanism": condition.mechanism}
                    | {"baseline": baseline.mechanism}
                    | median_of("ratio", seconds / times[baseline])
                )


def rows_of(
    options: Options,
    of_kvpress: Mapping[str, type[Any]] | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Rows of all models, see `compare`; of the last press also `INSTALLED`, and of the first model
    in all `WAYS`.

    Args:
        of_kvpress: the presses of kvpress, which are then timed instead of patches.
        advance: called after each round.

    Raises:
        PressError: if a model does not support a press.
    """
    presses, other = [press_name(name) for name in options.press], "patch"
    if of_kvpress is not None:
        # kvpress's version prunes immediately, because the cache is longer than its target.
        presses, other = [name for name in presses if name != _COUNTING], NAME
    models = {spec.name: spec.load() for spec in options.specs}
    chosen = timed_models.conditions(presses, [RATIO], ("hook", other))
    last = [FULL, *chosen[-2:]]
    scope = partial(between_intervals, context=options.context, of_kvpress=of_kvpress)
    scopes = {name: {one: scope(one, model) for one in chosen} for name, model in models.items()}
    for name, way, rounds in options.timed:
        steps = Steps(models[name], options.context, way)
        few = scopes[name] if way == EAGER else {one: scopes[name][one] for one in last}
        if way == timed_models.INSTALLED:
            few = {one: partial(left_installed, opens) for one, opens in few.items()}
        times = times_in_turn(few, steps, rounds=rounds, advance=advance)
        yield from compare(times, model=name, **way._asdict())


def beside_kvpress(**options: Any) -> Iterator[dict[str, Any]]:
    """The rows with kvpress in them, for the interpreter in which it is installed."""
    return rows_of(Options(**options), presses_of_kvpress())


# ---- reading the table -------------------------------------------------------------------------


_NO_SLOWER = 1.05
"""A need is met if the interval of the ratio ends below this."""

_STEPS: dict[Any, str] = {
    "eager": "eager step in a scope",
    "installed": "eager step, idle on every layer",
    "compiled": "compiled step in a scope",
}
"""What is timed, by the way to run, in figures."""

_FINDINGS: dict[str, list[str]] = data_of(__file__)
"""By name: the query for rows, of which the slowest is reported, the sentence and the need."""


class Overhead(Experiment[Options]):
    """Time decode steps with a press open, by mechanism, against the bare model.

    How much slower is a decode step with an open press that does not prune in it, by mechanism
    and depth of the model, eager and compiled, with dynamic and static caches?

    All conditions run once per round, in turn, and are divided by the baseline of the same round;
    the median ratio is given with a 95% bootstrap interval over rounds, and counts as no slower if
    that of every row ends below 1.05, also of rows that are not quoted: the quoted one has the
    largest median. A time is the fastest of four steps (compiled, of twenty), after three in which
    hooks and patches leave the layers of an eager model, where the press has nothing to do: only
    those on the decoder are timed. What they cost on every layer is timed with the last press,
    which is made to leave them there (`installed`). kvpress, whose hooks always stay, is timed in a
    separate interpreter with an older transformers, in turn with the bare model and hooks there.
    The models are narrow so that the cost of a mechanism is visible; on a wider model or a GPU the
    same microseconds are a smaller share. All conditions decode from the same pruned cache, so
    these times show neither what attention over a pruned cache saves nor what the layers of such a
    cache cost. Only the first model is compiled and reads static caches, with the last press,
    because a deep model takes minutes to compile. A compiled model is compiled anew in each of its
    rounds, in the scope that is timed, so the interval covers that.
    """

    name = "overhead"
    title = "What an open scope costs in time"
    evidence = Evidence.TIME
    full = Options()
    quick = Options(layers=(4, 28), rounds=24, compiled=False, kvpress=False)
    claims: ClassVar = {
        "decode": Claim(replace(quick, layers=(28,)), within=0.05),
        "bare": Claim(replace(quick, layers=(4,)), within=0.05),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        own.opened(("KnormPress",))  # prunes the cache that all conditions decode from
        presses, (context,) = own.opened(Options.press), own.at_most(Options.context)
        options = self.quick_on(own, press=presses, context=context, rounds=12)
        steps = 13 * (_SETTLING + _REPEATS["eager"]) * (1 + 2 * len(presses))
        return Planned(options, tokens=2 * context, steps=steps, seconds=2)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """The rows of all models, see `compare`, with kvpress if it is installed."""
        options = timed_models.that_compile(options, progress)
        total = sum(rounds for _, _, rounds in options.timed)
        advance = partial(progress.advance, progress.add_task(self.name, total=total))
        table = pd.DataFrame(rows_of(options, advance=advance))
        return {self.name: joined_by_kvpress(table, options, progress, __name__)}

    def findings(self, tables: Tables) -> list[Finding]:
        found = []
        for name, (query, sentence, need) in _FINDINGS.items():
            rows = tables["overhead"].query(query)
            for row in rows.nlargest(1, "ratio").to_dict("records"):
                times = f"**{row['ratio']:.2f}**{bracket(row['low'], row['high'])} times"
                model = row["model"].removeprefix(timed_models.RANDOM)
                cache = "" if row["cache"] == "dynamic" else f", {row['cache']} cache"
                text = sentence.format(times, f"({press_label(row['press'])}, {model}{cache})")
                works: Any = "works" if np.nanmax(rows[["ratio", "high"]]) < _NO_SLOWER else "costs"
                found.append(Finding(name, text, need, works if need else None))
        return found

    def views(self, tables: Tables) -> list[ResultTable]:
        rows = tables["overhead"]
        over = rows["mechanism"] + " / " + rows["baseline"]
        rows = rows.assign(over=over, press=rows["press"].map(press_label))
        cells = [bracketed(row, "ratio") for row in rows.to_dict("records")]
        note = (
            f"Time of a decode step over the baseline's: medians, with {METHOD} over rounds. "
            "kvpress and its baselines run in another interpreter, with an older transformers."
        )
        return [wide_table(note, rows, ["model", "run", "cache", "press"], "over", cells)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        shown = tables["overhead"].query("baseline == 'bare'")
        shown = shown.assign(label=shown["press"].map(press_label) + ", " + shown["mechanism"])
        found = {}
        for run, rows in shown.groupby("run", sort=False):  # kvpress's compiled steps take longest
            of_models: Any = rows.groupby(["model", "cache"], sort=False)
            panels = {f"{model}: {cache} cache": each for (model, cache), each in of_models}
            label = (
                f"Time of one {_STEPS[run]}, over that of the bare model: medians with {METHOD} "
                "over rounds"
            )
            name = self.name if run == "eager" else f"{self.name}_{run}"
            found[name] = ratio_figure(panels, label, "time / time of the bare model")
        return found

    def contrasts(self, tables: Tables) -> list[Contrast]:
        found, named = [], {"hook": "hooks", "patch": "patches"}
        acting = tables["overhead"].query(f"press != '{_COUNTING}' and baseline == 'bare'")
        for how, rows in acting.groupby("run", sort=False):
            slowest: Any = rows.groupby("mechanism", sort=False)["ratio"].max().rename(named)
            found.append(Contrast(f"Slowest {_STEPS[how]}", slowest.to_dict()))
        return found


EXPERIMENT = Overhead()
