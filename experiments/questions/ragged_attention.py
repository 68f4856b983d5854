"""What does attention over ragged heads cost, against as many bytes in heads of one length?

Three things are timed: the attention function alone; all that a layer does with its cache, which is
to append a token and to attend; and a whole decode step. Three caches take turns: everything, what
is left where all heads evict as many tokens, and what is left where they share a budget. The first
two are plain `DynamicCache`s that the model reads by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.progress import Progress
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from attention_patch import headwise
from attention_patch.kernels import attend
from experiments import UserError
from experiments.framework.experiment import Experiment, Finding, Tables
from experiments.framework.intervals import median_interval
from experiments.framework.options import at_least, checked_positive_share, several
from experiments.framework.plots import MUTED, new_figure, press_colour, style
from experiments.framework.tables import ResultTable
from experiments.framework.timing import threads
from press_core import AttentionSite, RaggedLayer, attention_sites, cache_nbytes
from press_core.presses.adakv import shared_budget
from press_core.select import n_kept

LAYERS = 4
"""Of the model: enough that the processor does not hold the whole cache in its own."""

_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"layer_types": ["full_attention"] * LAYERS},
    "gpt_oss": {"layer_types": ["full_attention"] * LAYERS, "num_local_experts": 4},
}
"""Families whose attention differs, and what makes all their layers attend to everything."""

FULL, UNIFORM, RAGGED = "full", "uniform", "ragged"
LONG, MANY, LARGE = 4096, 32, "4,096 tokens or 32 heads"
ALONE, LAYER, STEP = "attention", "layer", "step"


@dataclass(frozen=True)
class Case:
    """One shape that is measured.

    Attributes:
        family: of the model, with random weights.
        batch, kv_heads, group, head_dim: `B`, `H_kv`, `G`, `d`.
        context: tokens in the cache.
        ratio: share of them evicted.
        threads: how many torch may use.
    """

    family: str
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    context: int
    ratio: float
    threads: int


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: in which every cache takes its turn.
        repeats: runs of each in a round, of which the quickest counts.
        most_bytes: of the full cache; cases that need more are left out.
    """

    rounds: int = 15
    repeats: int = 3
    most_bytes: int = 2**29


def cases(
    families: Iterable[str] = ("llama",),
    batches: Iterable[int] = (1, 8),
    shapes: Iterable[tuple[int, int, int]] = ((4, 2, 64), (8, 4, 64), (8, 4, 128)),
    contexts: Iterable[int] = (1024, 4096, 16384, 32768),
    ratios: Iterable[float] = (0.5, 0.8, 0.9),
    thread_counts: Iterable[int] = (1, 2),
) -> list[Case]:
    """Every combination; a shape is `(H_kv, G, d)`."""
    grid = itertools.product(families, batches, shapes, contexts, ratios, thread_counts)
    return [Case(f, b, *shape, n, ratio, t) for f, b, shape, n, ratio, t in grid]


def measure(
    asked: Iterable[Case], effort: Effort = Effort(), advance: Callable[[], object] = lambda: None
) -> pd.DataFrame:
    """Times of all cases, one row per case, thing timed and cache it is compared with.

    Args:
        advance: called after each case.

    Returns:
        The columns of `Case`; `timed`; `against` (the cache that the ragged one is compared with);
        `time`, the median over rounds of the ratio to it, with `low` and `high`, its 95% interval;
        `quickest`, the ratio of the quickest runs; `us`, the ragged cache's quickest microseconds
        per layer, for context; `bytes`, the ragged cache's over those of the full one.
    """
    rows: list[dict[str, Any]] = []
    for case in asked:
        full_bytes = 8 * LAYERS * case.batch * case.kv_heads * case.head_dim * case.context
        if full_bytes <= effort.most_bytes:
            with threads(case.threads):
                rows += _rows(case, effort)
        advance()
    return pd.DataFrame(rows)


@torch.inference_mode()
def _rows(case: Case, effort: Effort) -> Iterator[dict[str, Any]]:
    bench = _Bench(case)
    n_bytes = bench.bytes[RAGGED] / bench.bytes[FULL]
    for timed, run in ((ALONE, bench.alone), (LAYER, bench.layer), (STEP, bench.step)):
        seconds = _in_turn(bench, {name: run(name) for name in bench.caches}, effort)
        ragged = seconds[RAGGED]
        for against in (UNIFORM, FULL):
            ratios = ragged / seconds[against]
            low, high = median_interval(ratios)
            yield (
                asdict(case)
                | {"timed": timed, "against": against}
                | {"time": float(np.median(ratios)), "low": low, "high": high}
                | {"quickest": float(ragged.min() / seconds[against].min())}
                | {"us": 1e6 * float(ragged.min()) / LAYERS, "bytes": n_bytes}
            )


def _in_turn(
    bench: _Bench, runs: dict[str, Callable[[], None]], effort: Effort
) -> dict[str, np.ndarray[Any, Any]]:
    """Seconds of each, `(rounds,)`."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(effort.rounds + 1):
        for name, run in runs.items():
            with bench.opened(name):
                times[name].append(min(_seconds(run) for _ in range(effort.repeats)))
    return {name: np.array(seconds[1:]) for name, seconds in times.items()}


def _seconds(run: Callable[[], None]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


class _Bench:
    """A model with several layers, so that no layer's cache is left in the processor's own."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = _model(case)
        self.sites = attention_sites(self.model)
        self.caches = self._caches()
        self.bytes = {name: cache_nbytes(cache) for name, cache in self.caches.items()}
        one = case.batch, case.kv_heads, 1, case.head_dim
        self.query = torch.randn(case.batch, case.kv_heads * case.group, 1, case.head_dim)
        self.new = torch.randn(one), torch.randn(one)
        self.token = torch.ones(case.batch, 1, dtype=torch.int64)

    def _caches(self) -> dict[str, Cache]:
        case = self.case
        full, uniform, ragged = (DynamicCache(config=self.model.config) for _ in range(3))
        shape = case.batch, case.kv_heads, case.context, case.head_dim
        n = n_kept(case.context, case.ratio)
        of_heads = 0.75 + 0.5 * torch.rand(*shape[:2], 1)
        chosen = shared_budget(torch.rand(shape[:3]) * of_heads, n, alpha_safeguard=0.2)
        positions = torch.arange(case.context).view(1, 1, -1)
        for site in self.sites:
            keys, values = torch.randn(shape), torch.randn(shape)
            full.update(keys, values, site.layer_idx)
            uniform.update(keys[:, :, :n].clone(), values[:, :, :n].clone(), site.layer_idx)
            layer = RaggedLayer.of(keys, values, chosen, positions, case.context)
            ragged.layers[site.layer_idx] = layer
        return {FULL: full, UNIFORM: uniform, RAGGED: ragged}

    def opened(self, name: str) -> AbstractContextManager[Any]:
        """The scope that a cache is decoded in."""
        return headwise(self.model) if name == RAGGED else nullcontext()

    def alone(self, name: str) -> Callable[[], None]:
        """The attention function, of all layers."""
        calls = [
            self._attention(site, self.caches[name].layers[site.layer_idx]) for site in self.sites
        ]
        if name == RAGGED:  # attention comes after the token of the call
            for site in self.sites:
                self._append(self.caches[name].layers[site.layer_idx])

        def run() -> None:
            for call in calls:
                call()

        return run

    def layer(self, name: str) -> Callable[[], None]:
        """Appending a token and attending, of all layers."""
        layers = [self.caches[name].layers[site.layer_idx] for site in self.sites]

        def run() -> None:
            for site, layer in zip(self.sites, layers, strict=True):
                with _restored(layer):
                    self._append(layer)
                    self._attention(site, layer)()

        return run

    def step(self, name: str) -> Callable[[], None]:
        """A decode step of the whole model."""
        cache = self.caches[name]

        def run() -> None:
            with _restored(*cache.layers):
                self.model(input_ids=self.token, past_key_values=cache)

        return run

    def _append(self, layer: Any) -> None:
        if isinstance(layer, RaggedLayer):
            layer.allow_update(_Open())
        layer.update(*self.new)

    def _attention(self, site: AttentionSite, layer: Any) -> Callable[[], Any]:
        module, query = site.module, self.query
        if isinstance(layer, RaggedLayer):
            return lambda: attend(site, layer, None, None, module, query, *self.new, None)
        modeling = import_module(type(module).__module__)
        own = modeling.eager_attention_forward
        function = site.interface.get_interface(site.attn_implementation, own)
        more = {} if site.softcap is None else {"softcap": site.softcap}
        return lambda: function(
            module, query, layer.keys, layer.values, None, scaling=site.scaling, **more
        )


class _Open:
    """Stands for the scope that lets a layer grow, where none is timed."""

    is_open = True


@contextmanager
def _restored(*layers: Any) -> Iterator[None]:
    """Takes away what is appended inside."""
    before = [(layer.keys, layer.values, layer.get_seq_length()) for layer in layers]
    yield
    for layer, (keys, values, length) in zip(layers, before, strict=True):
        if isinstance(layer, RaggedLayer):
            layer.crop(length - layer.get_seq_length())
        else:
            layer.keys, layer.values = keys, values


def _model(case: Case) -> PreTrainedModel:
    """Narrow, so that a step is mostly attention; hybrid families without their sliding layers."""
    config = AutoConfig.for_model(
        case.family,
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=case.kv_heads * case.group,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
        max_position_embeddings=2**17,
        **_OF_FAMILY[case.family],
    )
    implementation = "sdpa" if case.family == "llama" else "eager"
    made = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return made.eval()


# ---- the experiment ------------------------------------------------------------------------------


def _checked_family(names: Any) -> Any:
    unknown = [name for name in names or () if name not in _OF_FAMILY]
    if unknown:
        known = ", ".join(_OF_FAMILY)
        raise typer.BadParameter(f"{unknown[0]!r} is not measured here; there are {known}")
    return names


@dataclass(frozen=True)
class Options:
    """Which cases are measured: every combination."""

    family: Annotated[
        tuple[str, ...], several(str, f"Family: {', '.join(_OF_FAMILY)}.", _checked_family)
    ] = tuple(_OF_FAMILY)
    batch: Annotated[tuple[int, ...], several(int, "Rows.", at_least(1))] = (1, 8)
    heads: Annotated[
        tuple[str, ...], several(str, "KV heads x queries of each x channels, such as 8x4x128.")
    ] = ("4x2x64", "8x4x128")
    context: Annotated[tuple[int, ...], several(int, "Tokens in the cache.", at_least(16))] = (
        1024,
        4096,
        16384,
    )
    ratio: Annotated[
        tuple[float, ...],
        several(float, "Share of the tokens to evict, in (0, 1).", checked_positive_share),
    ] = (0.5, 0.8, 0.9)
    threads: Annotated[tuple[int, ...], several(int, "Threads of torch.", at_least(1))] = (1, 2)
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take their turn.")] = 5

    @property
    def cases(self) -> list[Case]:
        """All combinations.

        Raises:
            UserError: if heads cannot be read.
        """
        shapes = map(_shape, self.heads)
        return cases(self.family, self.batch, shapes, self.context, self.ratio, self.threads)


def _shape(text: str) -> tuple[int, int, int]:
    try:
        kv_heads, group, head_dim = map(int, text.split("x"))
    except ValueError:
        raise UserError(f"--heads {text!r}: write three numbers such as 8x4x128") from None
    if min(kv_heads, group, head_dim) < 1 or head_dim % 2:
        raise UserError(f"--heads {text!r}: heads are 1 or more, channels an even number")
    return kv_heads, group, head_dim


class RaggedAttention(Experiment[Options]):
    """Time attention over heads of different lengths, layer by layer and step by step."""

    name = "ragged_attention"
    title = "What attention over ragged heads costs"
    question = (
        "How long does a decode step over heads of different lengths take, against as many bytes "
        "in heads of one length, and against the full cache?"
    )
    method = (
        "Caches of random numbers take turns in a model of four layers: everything, what is left "
        "where all heads evict as many tokens, and what is left where they share a budget. Timed "
        "are the attention function alone, with the appending of a token, and a whole decode step. "
        "The models are narrow, so that a step is mostly attention; in a wide one it matters less. "
        "Cases whose whole cache takes more than half a GiB are left out."
    )
    full = Options()
    quick = Options(
        family=("llama",),
        batch=(1,),
        heads=("4x2x64",),
        context=(1024, 4096),
        ratio=(0.5, 0.8),
        threads=(1,),
    )

    def measure(self, options: Options, progress: Progress) -> Tables:
        """The table `ragged_attention`; see the function `measure`."""
        asked = options.cases
        task = progress.add_task("ragged attention", total=len(asked))
        table = measure(asked, Effort(options.rounds), partial(progress.advance, task))
        if table.empty:
            raise UserError(
                f"every cache asked for takes more than {Effort.most_bytes / 2**20:.0f} MiB; "
                "give a shorter --context or a smaller --batch"
            )
        return {self.name: table}

    def findings(self, tables: Tables) -> list[Finding]:
        steps = _steps(tables[self.name])
        large = (steps["context"] >= LONG) | (steps["batch"] * steps["kv_heads"] >= MANY)
        uniform, full = (steps["against"] == against for against in (UNIFORM, FULL))
        step = "a step over ragged heads takes"
        told = (
            (
                "large",
                large & uniform,
                f"From {LARGE} on, {step}",
                "over even ones",
            ),
            ("small", ~large & uniform, f"Below {LARGE}, {step}", "over even ones"),
            (FULL, full, step.capitalize(), "over the full cache"),
        )
        found = []
        for key, chosen, begins, held in told:
            times = steps.loc[chosen, "time"]
            if not times.empty:
                span = f"{times.min():.2f} to {times.max():.2f}"
                text = f"{begins} **{times.median():.2f}** times as long as {held} ({span})."
                found.append(Finding(key, text))
        return found

    def views(self, tables: Tables) -> list[ResultTable]:
        table = tables[self.name].sort_values("ratio", kind="stable")
        keys = [name for name in Case.__dataclass_fields__ if name != "ratio"]
        ratios = table["ratio"].unique()
        rows = []
        for case, own in table.groupby(keys, sort=False):
            family, batch, kv_heads, group, head_dim, context, n_threads = case
            heads = f"{kv_heads}x{group}x{head_dim}"
            line = [family, str(batch), heads, f"{context:,}", str(n_threads)]
            rows.append([*line, *(_cell(own, *column, ratios) for column in _COLUMNS)])
        columns = [f"{timed} / {against}" for timed, against in _COLUMNS]
        note = (
            "Ragged heads over as many bytes in heads of one length (uniform) and over everything "
            f"(full), with {', '.join(f'{ratio:.0%}' for ratio in ratios)} evicted: medians over "
            "rounds."
        )
        head = ["family", "batch", "heads", "tokens", "threads", *columns]
        return [ResultTable(note, head, rows, left=3)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        steps = _steps(tables[self.name])
        figure, axes = new_figure(1, 2, width=7.6, height=3.2)
        with style():
            for panel, against in zip(axes, (UNIFORM, FULL), strict=True):
                _draw_steps(panel, steps[steps["against"] == against])
                panel.set_title(f"Step / {against}")
        figure.set_label(
            "Time of a decode step over ragged heads, over that on as many bytes in heads of one "
            "length (left) and on the full cache (right), a dot per case"
        )
        return {self.name: figure}


_COLUMNS = ((ALONE, UNIFORM), (LAYER, UNIFORM), (STEP, UNIFORM), (STEP, FULL))


def _cell(own: pd.DataFrame, timed: str, against: str, ratios: Iterable[float]) -> str:
    """The times of a case, ratio by ratio."""
    rows = own[(own["timed"] == timed) & (own["against"] == against)]
    times = rows.set_index("ratio")["time"].reindex(list(ratios))
    return " · ".join("-" if pd.isna(time) else f"{time:.2f}" for time in times)


def _steps(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["timed"] == STEP]


def _draw_steps(panel: Axes, steps: pd.DataFrame) -> None:
    """A column of dots per context and ratio."""
    panel.axhline(1, color=MUTED, linewidth=1)
    contexts, ratios = sorted(steps["context"].unique()), sorted(steps["ratio"].unique())
    colour = press_colour("ObservedAttentionPress")
    for index, ratio in enumerate(ratios):
        rows = steps[steps["ratio"] == ratio]
        offset = 0.7 * ((index + 0.5) / len(ratios) - 0.5)
        places = [contexts.index(context) + offset for context in rows["context"]]
        panel.plot(places, rows["time"], "o", color=colour, alpha=0.7, markeredgewidth=0)
        label: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 7.5, "color": MUTED}
        for place in sorted(set(places)):
            most = rows["time"][[one == place for one in places]].max()
            panel.annotate(
                f"{ratio:.0%}", (place, most), (0, 4), textcoords="offset points", **label
            )
    panel.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(-0.5, len(contexts) - 0.5)
    panel.set_ylim(0, 1.15 * max(1.0, steps["time"].max()))
    panel.set_xlabel("tokens of context (labels: share evicted)")


EXPERIMENT = RaggedAttention()
