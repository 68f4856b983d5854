"""Sizes: what a cache and the prefill that fills it take, measured and by arithmetic.

*Measured*: bytes that the cache holds after a prefill (`press_core.cache_nbytes`, spare room
included), and the *peak*: what is allocated at most while the prefill runs and the press acts,
beyond what was allocated before, weights among them. Torch's own allocations are counted one by one
(on a CPU as its profiler reports them, on a GPU by its caching allocator), so that a repeated run
gives the same number. The resident size of the process would count what the C library has not
given back, too, and its peak never falls.

*Arithmetic*: `L` layers of `H_kv` heads of `d` channels hold `2 * L * H_kv * d * S * (1 - ratio)`
numbers of `S` tokens. That is set beside every measurement, and worked out for models that are too
large to be run here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.progress import Progress
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, PreTrainedModel

from experiments import UserError
from experiments.framework.experiment import Experiment, Finding, Tables
from experiments.framework.options import Device, checked_positive_share
from experiments.framework.own_model import LeftOutError, OwnModel, Planned
from experiments.framework.plots import (
    INK,
    MUTED,
    NO_PRESS,
    legend_outside,
    new_figure,
    press_colour,
    press_label,
    press_line,
    style,
)
from experiments.framework.tables import ResultTable
from experiments.loading import load_model, short_name
from experiments.testbed.families import build
from experiments.testbed.recipes import MECHANISMS, press_name, suited_pair
from press_core import Press, attention_sites, cache_nbytes
from press_core.presses.think import ThinK

PRESSES = ("SnapKVPress", "AdaKVPress", "ThinKPress", "KVzipPress")
"""What the study measures: tokens, tokens by head, channels, and tokens once all are read."""

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler tells of each start and stop


@dataclass(frozen=True)
class Options:
    """What is measured."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Shipped model, folder or hub id.",
            show_default="a random Llama of 4 layers, 4/2 heads of 32, and one of 8 layers",
        ),
    ] = None
    press: Annotated[
        tuple[str, ...], typer.Option(help="Press to measure, such as SnapKV. Repeatable.")
    ] = PRESSES
    context: Annotated[
        tuple[int, ...], typer.Option(min=2, help="Tokens of a prefill. Repeatable.")
    ] = (1024, 2048, 4096, 8192, 16384)
    ratio: Annotated[
        float, typer.Option(help="Share to evict, in (0, 1).", callback=checked_positive_share)
    ] = 0.5
    device: Device = "cpu"


class Shape(NamedTuple):
    """What the size of a model's cache depends on."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int = 2

    def nbytes(self, tokens: int, ratio: float = 0.0) -> float:
        """Bytes of the keys and values of `tokens` tokens, a share `ratio` of which is gone."""
        per_token = 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize
        return per_token * tokens * (1 - ratio)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """That of a model whose layers all attend to all tokens.

        Raises:
            UserError: if some layers keep a sliding window.
        """
        sites = attention_sites(model)
        if len(sites) < model.config.num_hidden_layers:
            raise UserError(
                f"some layers of this {type(model).__name__} keep a sliding window, and the "
                "arithmetic is that of layers which keep all tokens; give a model without them"
            )
        return cls(len(sites), sites[0].num_kv_heads, sites[0].head_dim, model.dtype.itemsize)


REAL: dict[str, Shape] = {
    "Llama-3.1-8B": Shape(32, 8, 128),
    "Llama-3.1-70B": Shape(80, 8, 128),
    "Qwen3-8B": Shape(36, 8, 128),
    "Qwen3-32B": Shape(64, 8, 128),
}
"""Published configurations, in bfloat16."""

REAL_CONTEXTS = (32 * 2**10, 128 * 2**10, 2**20)
REAL_RATIOS = (0.0, 0.5, 0.8)


@dataclass(frozen=True)
class Size:
    """What is measured of one model.

    Attributes:
        contexts: tokens of the prefills.
        ratio: share that presses evict.
        presses: names of presses; without any press is measured too.
        both: longest context at which patches are measured too, beside hooks.
        twice: longest context for presses that read it twice.
    """

    contexts: tuple[int, ...] = Options.context
    ratio: float = Options.ratio
    presses: tuple[str, ...] = PRESSES
    both: int = 2048
    twice: int = 4096

    def cells(self) -> Iterator[Cell]:
        """All that is measured, shortest context first."""
        for context in self.contexts:
            yield Cell(context)
            for name in self.presses:
                if name != "KVzipPress" or context <= self.twice:
                    yield Cell(context, name, "hook")
                    if context <= self.both:
                        yield Cell(context, name, "patch")


class Cell(NamedTuple):
    """One prefill."""

    context: int
    press: str = NO_PRESS
    mechanism: str = "bare"


# ---- measuring -----------------------------------------------------------------------------------


def peak_nbytes(device: torch.device, work: Callable[[], None]) -> int:
    """Bytes that are allocated at most while `work` runs, beyond those allocated before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    held = peak = 0
    for n_bytes in _allocations(recorded):
        held += n_bytes
        peak = max(peak, held)
    return peak


def _allocations(recorded: Any) -> list[int]:
    """Bytes allocated and (negative) freed again, in their order."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"])]


def prefill(model: PreTrainedModel, ids: Tensor, press: Press | None) -> tuple[int, int]:
    """Peak of a prefill, and bytes of the cache that it leaves."""
    cache = DynamicCache()

    @torch.inference_mode()
    def work() -> None:
        if press is None:
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        else:
            with press(model):
                model(input_ids=ids, past_key_values=cache, logits_to_keep=1)

    peak = peak_nbytes(model.device, work)
    return peak, cache_nbytes(cache)


def make_press(cell: Cell, ratio: float, model: PreTrainedModel) -> Press | None:
    """The press of a cell at its usual settings; a ThinKPress stores what it keeps only."""
    if cell.press == NO_PRESS:
        return None
    pair = suited_pair(cell.press, ratio, cell.context, model)
    press = pair[list(MECHANISMS).index(cell.mechanism)]
    return replace(press, free_memory=True) if isinstance(press, ThinK) else press


def evicted(name: str, ratio: float) -> float:
    """Share of a cache's bytes that a press frees when it is told to evict `ratio`."""
    if name == NO_PRESS:
        return 0.0
    return ratio / 2 if name == "ThinKPress" else ratio  # which drops channels of keys only


def measure_prefills(
    subjects: Mapping[str, tuple[PreTrainedModel, Size]], progress: Progress
) -> pd.DataFrame:
    """The table `memory`; see `Memory.measure`.

    Args:
        subjects: by the name that the table gives it, a model and what is measured of it.
    """
    total = sum(len(list(size.cells())) for _, size in subjects.values())
    task, rows = progress.add_task("prefills", total=total), []
    for name, (model, size) in subjects.items():
        for row in _rows(model, size):
            rows.append({"model": name, **row})
            progress.advance(task)
    return pd.DataFrame(rows)


def _rows(model: PreTrainedModel, size: Size) -> Iterator[dict[str, Any]]:
    shape, bare = Shape.of(model), 0
    for cell in size.cells():
        ids = _context(model, cell.context)
        peak, held = prefill(model, ids, make_press(cell, size.ratio, model))
        if cell.press == NO_PRESS:
            bare = peak
        by_arithmetic = shape.nbytes(cell.context, evicted(cell.press, size.ratio))
        yield {
            "layers": shape.layers,
            **cell._asdict(),
            "ratio": 0.0 if cell.press == NO_PRESS else size.ratio,
            "bytes": held,
            "predicted": by_arithmetic,
            "measured_over_predicted": held / by_arithmetic,
            "peak": peak,
            "peak_over_bare": peak / bare,
        }


def _context(model: PreTrainedModel, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, model.config.vocab_size, (1, length), generator=generator)
    return ids.to(model.device)


def predicted(shapes: Mapping[str, Shape] = REAL) -> pd.DataFrame:
    """What arithmetic says of `shapes`.

    Returns:
        Columns `model`, `layers`, `kv_heads`, `head_dim`, `context`, `ratio` and `bytes`.
    """
    rows = [
        shape._asdict()
        | {"model": name, "context": context, "ratio": ratio}
        | {"bytes": shape.nbytes(context, ratio)}
        for name, shape in shapes.items()
        for context in REAL_CONTEXTS
        for ratio in REAL_RATIOS
    ]
    columns = ["model", "layers", "kv_heads", "head_dim", "context", "ratio", "bytes"]
    return pd.DataFrame(rows)[columns]


def _subjects(options: Options) -> dict[str, tuple[PreTrainedModel, Size]]:
    """What is measured: a given model, or two of which the shallow one gets the long contexts."""
    presses = tuple(map(press_name, options.press))
    size = Size(tuple(sorted(options.context)), options.ratio, presses)
    if options.model:
        return {
            short_name(options.model): (load_model(options.model, device=options.device)[0], size)
        }
    deep = replace(size, contexts=(4096,), twice=0)
    return {
        f"random Llama, {layers} layers": (
            _random_llama(layers).to(torch.device(options.device)),
            of,
        )
        for layers, of in ((4, size), (8, deep))
    }


def _random_llama(layers: int) -> PreTrainedModel:
    return build("llama", num_layers=layers, num_heads=4, num_kv_heads=2, head_dim=32)


# ---- reading the tables --------------------------------------------------------------------------


def sentence_on_arithmetic(memory: pd.DataFrame) -> str:
    """How far caches are from what arithmetic says."""
    by_press = memory.groupby("press", sort=False)["measured_over_predicted"].agg(["min", "max"])
    told = [
        f"{press_label(str(name))} {_span(row['min'], row['max'])}"
        for name, row in by_press.iterrows()
    ]
    return f"Measured cache bytes over predicted ones: {', '.join(told)}."


def sentence_on_peaks(memory: pd.DataFrame) -> str:
    """What each press does to the peak of the longest prefill that it was measured on."""
    of_model = memory[memory["model"] == memory["model"].iloc[0]]
    hooked = of_model[of_model["mechanism"] == "hook"]
    told = []
    for name, rows in hooked.groupby("press", sort=False):
        longest = rows.loc[rows["context"].idxmax()]
        bare = of_model[of_model["press"] == NO_PRESS].set_index("context").loc[longest["context"]]
        more, freed = longest["peak"] - bare["peak"], bare["bytes"] - longest["bytes"]
        told.append(
            f"{press_label(str(name))} {more / 2**20:+,.1f} MiB (frees {_mib(freed)} at "
            f"{longest['context']:,} tokens)"
        )
    return (
        "Peak of a prefill over that without a press, and what the press frees of the cache: "
        f"{', '.join(told)}."
    )


def sentence_on_depth(memory: pd.DataFrame) -> str:
    """What the prefill takes beside the cache, in models of different depths."""
    bare = memory[memory["press"] == NO_PRESS]
    shared = bare[bare.groupby("context")["layers"].transform("nunique") > 1]
    if shared.empty:
        return ""
    rows = shared[shared["context"] == shared["context"].max()]
    told = [
        f"{_mib(r['peak'] - r['bytes'])} MiB with {r['layers']} layers" for _, r in rows.iterrows()
    ]
    return (
        f"Beside the cache a prefill of {rows['context'].iloc[0]:,} tokens without a press takes "
        f"{' and '.join(told)}."
    )


def hook_over_patch(memory: pd.DataFrame) -> pd.Series[float]:
    """Peaks with hooks over those with patches, where both were measured."""
    keys = ["model", "context", "press"]
    peaks = memory.pivot(index=keys, columns="mechanism", values="peak")
    if not {"hook", "patch"} <= set(peaks):
        return pd.Series(dtype=float)
    return (peaks["hook"] / peaks["patch"]).dropna()


def _span(low: float, high: float) -> str:
    """Two numbers, or one if they look the same."""
    ends = dict.fromkeys((f"{low:.3f}", f"{high:.3f}"))
    return " to ".join(ends)


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:,.1f}"


def _measured(memory: pd.DataFrame) -> ResultTable:
    note = (
        f"{memory['model'].iloc[0]}: one prefill; presses, installed by hooks, evict "
        f"{memory['ratio'].max():.0%} (ThinK: of the channels of the keys). MiB of the cache, over "
        "the bytes that arithmetic gives; MiB at the peak, over the peak without a press:"
    )
    head = ["tokens", "press", "cache", "/ predicted", "peak", "/ no press"]
    rows: list[dict[Any, Any]] = memory[memory["mechanism"] != "patch"].to_dict("records")
    return ResultTable(note, head, [_measured_line(row) for row in rows], left=2)


def _measured_line(row: dict[Any, Any]) -> list[str]:
    line = [f"{row['context']:,}", press_label(row["press"]), _mib(row["bytes"])]
    line += [f"{row['measured_over_predicted']:.3f}", _mib(row["peak"])]
    return [*line, f"{row['peak_over_bare']:.2f}"]


def _real_line(rows: pd.DataFrame) -> list[str]:
    first = rows.iloc[0]
    sizes = [f"{n_bytes / 2**30:,.1f}" for n_bytes in rows["bytes"]]
    return [first["model"], f"{first['context']:,}", *sizes]


# ---- figures -------------------------------------------------------------------------------------


def _draw_measured(memory: pd.DataFrame) -> Figure:
    model = memory["model"].iloc[0]
    of_model = memory[(memory["model"] == model) & (memory["mechanism"] != "patch")]
    with style():
        figure, (cache, peak) = new_figure(1, 2, width=8.6, height=3.6)
        for name, rows in of_model.groupby("press", sort=False):
            look = _look(str(name))
            dots = {"color": look["color"], "marker": "o", "linestyle": "none"}
            cache.plot(rows["context"], rows["predicted"] / 2**20, **look)
            cache.plot(rows["context"], rows["bytes"] / 2**20, **dots)
            peak.plot(rows["context"], rows["peak"] / 2**20, **look, marker="o")
        longest = of_model["context"].max()
        for panel in (cache, peak):
            panel.set_xticks([longest * quarter / 4 for quarter in range(5)])
            panel.xaxis.set_major_formatter("{x:,.0f}")
            panel.set_ylim(bottom=0)
            panel.set_xlabel("tokens of context")
            panel.set_ylabel("MiB")
        cache.set_title("Cache: measured (dots), arithmetic (lines)")
        peak.set_title("Peak of the prefill, measured")
        legend_outside(figure, peak)
    return figure


def _look(name: str) -> dict[str, Any]:
    if name == NO_PRESS:
        return {"color": MUTED, "label": NO_PRESS}
    return press_line(name)


def _draw_models(models: pd.DataFrame) -> Figure:
    names = list(dict.fromkeys(models["model"]))
    with style():
        figure, (panel,) = new_figure(width=8.6, height=1.2 + 0.75 * len(names))
        for _, rows in models.groupby(["model", "context"], sort=False):
            model, context = rows[["model", "context"]].iloc[0]
            y = names.index(model) + 0.22 * (REAL_CONTEXTS.index(context) - 1)
            panel.plot(rows["bytes"] / 2**30, [y] * len(rows), color=_SHADES[context], zorder=1)
            for _, row in rows.iterrows():
                look = _RATIO_LOOKS[row["ratio"]]
                panel.plot(row["bytes"] / 2**30, y, color=_SHADES[context], **look)
        panel.axvline(80, color=MUTED, linewidth=1, linestyle=":")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:,g}")
        panel.set_yticks(range(len(names)), names)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.grid(visible=False, axis="y")
        panel.set_title("Keys and values of one sequence in bfloat16, by arithmetic")
        panel.set_xlabel("GiB (dotted: a GPU of 80 GiB)")
        legend_outside(figure, panel, handles=_legend())
    return figure


_SHADES = dict(
    zip(REAL_CONTEXTS, map(press_colour, ("TOVAPress", "SnapKVPress", "KVzipPress")), strict=True)
)
_RATIO_LOOKS: dict[float, dict[str, Any]] = {
    0.0: {"marker": "o"},
    0.5: {"marker": "D", "markersize": 4},
    0.8: {"marker": "o", "markerfacecolor": "white"},
}


def _legend() -> list[Line2D]:
    lines = [
        Line2D([], [], color=shade, label=f"{_short(context)} tokens")
        for context, shade in _SHADES.items()
    ]
    dots = [
        Line2D([], [], color=INK, linestyle="none", label=f"{ratio:.0%} evicted", **look)
        for ratio, look in _RATIO_LOOKS.items()
    ]
    return lines + dots


def _short(context: int) -> str:
    return f"{context // 2**20}M" if context >= 2**20 else f"{context // 2**10}k"


class Memory(Experiment[Options]):
    """Measure bytes of caches and peaks of prefills, and work them out for large models."""

    name = "memory"
    title = "What a cache takes"
    question = (
        "How much memory do a cache and the prefill that fills it take, by context length and "
        "press, and how much would they take in large models?"
    )
    method = (
        "Bytes are those that the cache holds after a prefill, spare room included. The peak is "
        "what is allocated at most while the prefill runs and the press acts, counted allocation "
        "by allocation, so that a repeated run gives the same number. Both are set beside "
        "arithmetic, which is then worked out for published models. What a C library keeps back "
        "and what a serving engine reserves are not in it."
    )
    full = Options()
    quick = Options(context=(1024, 2048, 4096))

    def on(self, own: OwnModel) -> Planned[Options]:
        if not own.keeps_all:
            raise LeftOutError(
                "some of its layers keep a sliding window, and the arithmetic is that of layers "
                "which keep all tokens"
            )
        presses, contexts = own.opened(PRESSES), own.at_most(512, 1024, 2048)
        options = self.quick_on(own, press=presses, context=contexts)
        return Planned(options, tokens=sum(contexts) * (1 + 2 * len(presses) + 4), seconds=3)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Prefills of all models, and the arithmetic for those that are too large.

        Returns:
            `memory`: per prefill the columns `model`, `layers`, `context`, `press`, `mechanism`,
            `ratio`; `bytes` of the cache, `predicted` ones, and `measured_over_predicted`; `peak`,
            bytes, see `peak_nbytes`, and `peak_over_bare`, times that without a press.
            `memory_models`: see `predicted`.
        """
        return {
            "memory": measure_prefills(_subjects(options), progress),
            "memory_models": predicted(),
        }

    def findings(self, tables: Tables) -> list[Finding]:
        memory = tables["memory"]
        most = memory["measured_over_predicted"].max()
        text = (
            f"A cache holds at most **{most:.3f}** times the bytes that arithmetic gives, over "
            f"{len(memory)} prefills with and without presses."
        )
        found = [Finding("bytes", text, "free the memory of what is evicted", "works")]
        pressed = memory.loc[memory["press"] != NO_PRESS, "peak_over_bare"]
        if len(pressed):
            text = (
                f"The peak of a prefill with a press is {pressed.min():.2f} to "
                f"**{pressed.max():.2f}** times that without one."
            )
            verdict: Any = "works" if pressed.max() < 1 else "costs"
            found.append(Finding("peak", text, "lower the peak of a prefill", verdict))
        ratios = hook_over_patch(memory)
        if len(ratios):
            text = (
                f"With hooks the peak is {ratios.min():.3f} to **{ratios.max():.3f}** times that "
                f"with patches, over {len(ratios)} prefills."
            )
            found.append(Finding("mechanisms", text))
        return found

    def views(self, tables: Tables) -> list[ResultTable]:
        """Measured sizes of each model, and predicted ones of all."""
        memory, models = tables["memory"], tables["memory_models"]
        measured = [_measured(of_model) for _, of_model in memory.groupby("model", sort=False)]
        real = [_real_line(of) for _, of in models.groupby(["model", "context"], sort=False)]
        head = ["model", "tokens", *(f"{ratio:.0%} evicted" for ratio in REAL_RATIOS)]
        return [*measured, ResultTable("By arithmetic, GiB of the cache in bfloat16:", head, real)]

    def remarks(self, tables: Tables) -> list[str]:
        memory = tables["memory"]
        said = [
            sentence_on_arithmetic(memory),
            sentence_on_peaks(memory),
            sentence_on_depth(memory),
        ]
        return [sentence for sentence in said if sentence]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """Sizes of the first model by context, `memory`; by arithmetic, `memory_models`."""
        return {
            "memory": _draw_measured(tables["memory"]),
            "memory_models": _draw_models(tables["memory_models"]),
        }


EXPERIMENT = Memory()
