"""What does attention over ragged heads cost, against as many bytes in heads of one length?

A decode step is timed on three caches, in turn: everything, what is left where all heads evict as
many tokens, and what is left where they share a budget. The model reads the first two by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.progress import Progress
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attention_patch import headwise
from experiments import UserError
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Experiment, Finding, Tables
from experiments.framework.intervals import METHOD, bracket, median_interval
from experiments.framework.options import at_least, checked_positive_share, several
from experiments.framework.plots import MUTED, new_figure, press_colour, style
from experiments.framework.tables import ResultTable
from experiments.framework.timing import in_turn, threads
from experiments.testbed.decoding import (
    FULL,
    UNIFORM,
    Decoder,
    Held,
    full_cache,
    head_budgets,
    uniform_cache,
)
from experiments.testbed.variants import evicted
from press_core import cache_nbytes

LAYERS = 4
"""Of the model: enough that the processor does not hold the whole cache in its own."""

_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"layer_types": ["full_attention"] * LAYERS},
    "gpt_oss": {"layer_types": ["full_attention"] * LAYERS, "num_local_experts": 4},
}
"""Families whose attention differs, and what makes all their layers attend to everything."""

RAGGED = "ragged"
LONG, MANY, LARGE = 4096, 32, "4,096 tokens or 32 heads"
STEP = "step"
"""What is timed."""


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

    rounds: int = 6
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
    """Times of all cases, one row per case and cache that the ragged one is compared with.

    Args:
        advance: called after each case.

    Returns:
        The columns of `Case`; `timed`; `against` (what it is compared with); `time`, the median
        over rounds of the ratio to it, with `low` and `high`, its interval; `quickest`, the
        ratio of the quickest runs; `us`, the ragged cache's quickest microseconds per layer, for
        context; `bytes`, the ragged cache's over those of the full one.
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
    torch.manual_seed(0)
    model = _model(case)
    full = full_cache(model, case.context, case.batch)
    ragged = evicted(full, head_budgets(full, case.ratio))
    caches = {
        FULL: Held(full, nullcontext),
        UNIFORM: Held(uniform_cache(full, case.ratio), nullcontext),
        RAGGED: Held(ragged, partial(headwise, model)),
    }
    n_bytes = cache_nbytes(ragged) / cache_nbytes(full)
    decoder = Decoder(model, case.context, case.batch)
    scopes = {name: partial(decoder.turn, held) for name, held in caches.items()}
    run = partial(in_turn, scopes, decoder.step, prepare=decoder.restore)
    seconds = run(rounds=effort.rounds, repeats=effort.repeats)
    for against in (UNIFORM, FULL):
        ratios = seconds[RAGGED] / seconds[against]
        low, high = median_interval(ratios)
        yield (
            asdict(case)
            | {"timed": STEP, "against": against}
            | {"time": float(np.median(ratios)), "low": low, "high": high}
            | {"quickest": float(seconds[RAGGED].min() / seconds[against].min())}
            | {"us": 1e6 * float(seconds[RAGGED].min()) / LAYERS, "bytes": n_bytes}
        )


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
    ] = ("llama", "gpt_oss")
    batch: Annotated[tuple[int, ...], several(int, "Rows.", at_least(1))] = (1, 8)
    heads: Annotated[
        tuple[str, ...], several(str, "KV heads x queries of each x channels, such as 8x4x128.")
    ] = ("4x2x64", "8x4x128")
    context: Annotated[tuple[int, ...], several(int, "Tokens in the cache.", at_least(16))] = (
        1024,
        4096,
    )
    ratio: Annotated[
        tuple[float, ...],
        several(float, "Share of the tokens to evict, in (0, 1).", checked_positive_share),
    ] = (0.8,)
    threads: Annotated[tuple[int, ...], several(int, "Threads of torch.", at_least(1))] = (1,)
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take their turn.")] = 6

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
        "where all heads evict as many tokens, and what is left where they share a budget. A step "
        "is timed on each. The models are narrow, so that a step is mostly attention; in a wide "
        "one it matters less. Cases whose whole cache takes more than half a GiB are left out."
    )
    evidence = Evidence.TIME
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
        told = (
            ("large", large & uniform, f"From {LARGE} on,", "over even ones"),
            ("small", ~large & uniform, f"Below {LARGE},", "over even ones"),
            (FULL, full, "In all,", "over the full cache"),
        )
        found = []
        for key, chosen, begins, held in told:
            cases = steps[chosen]
            if not cases.empty:
                quicker = int((cases["high"] < 1).sum())
                text = (
                    f"{begins} a step over ragged heads is quicker than one {held} in "
                    f"**{quicker}** of {len(cases)} cases."
                )
                found.append(Finding(key, text))
        return found

    def views(self, tables: Tables) -> list[ResultTable]:
        table = _steps(tables[self.name]).sort_values("ratio", kind="stable")
        keys = [name for name in Case.__dataclass_fields__ if name != "ratio"]
        ratios = table["ratio"].unique()
        rows = []
        for case, own in table.groupby(keys, sort=False):
            family, batch, kv_heads, group, head_dim, context, n_threads = case
            heads = f"{kv_heads}x{group}x{head_dim}"
            line = [family, str(batch), heads, f"{context:,}", str(n_threads)]
            rows.append([*line, *(_cell(own, against, ratios) for against in (UNIFORM, FULL))])
        note = (
            "Ragged heads over as many bytes in heads of one length (uniform) and over everything "
            f"(full), with {', '.join(f'{ratio:.0%}' for ratio in ratios)} evicted: medians, with "
            f"{METHOD} over rounds; quicker or slower where that leaves out 1."
        )
        head = ["family", "batch", "heads", "tokens", "threads", "step / uniform", "step / full"]
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


def _cell(own: pd.DataFrame, against: str, ratios: Iterable[float]) -> str:
    """The times of a case, ratio by ratio."""
    cases = own[own["against"] == against].set_index("ratio").reindex(list(ratios))
    rows = cases[["time", "low", "high"]].itertuples(index=False)
    return " · ".join("-" if pd.isna(t) else f"{t:.2f}{bracket(*ends)}" for t, *ends in rows)


def _steps(table: pd.DataFrame) -> pd.DataFrame:
    """Of a table that may hold times of parts of a step, too."""
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
