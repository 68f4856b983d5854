"""Whether presses and everything else that is done to models get along.

Each mechanism meets each companion (`experiments.companions`) that begins before its scope and
outlives it, that comes and goes inside of it, or that comes after it. What is kept, and the logits
of the prefill and of a decode step, are held against those that the companion gives without any
press, and, once the scope is closed, against those of the companion alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.companions import COMPANIONS, Companion
from experiments.experiment import Experiment, Tables
from experiments.families import VOCABULARY, build
from experiments.heatmap import draw_cells
from experiments.ladder import LADDER
from experiments.ladder.contain import contained
from experiments.plots import legend_outside, new_figure, style
from experiments.report import write_results
from experiments.tables import markdown_table
from press_core.cache.ragged import RaggedLayer
from press_core.select import n_kept, top_positions

RATIO, CONTEXT = 0.5, 24
BEFORE, INSIDE, AFTER = PHASES = ("before", "inside", "after")
"""When the companion comes: before the scope opens, inside of it, after it was closed."""

_NOTHING = next(iter(COMPANIONS))
RIGHT, ERROR, WRONG = OUTCOMES = ("right", "error", "wrong")

_generator = torch.Generator().manual_seed(0)
IDS = torch.randint(3, VOCABULARY, (1, CONTEXT), generator=_generator)
NEXT = torch.randint(3, VOCABULARY, (1, 1), generator=_generator)


# ---- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Logits of the prefill and of a decode step, and what each layer holds of the prefill.

    Attributes:
        logits: `(1, q, vocabulary)` each; or whatever a companion without a cache answers.
        states: keys and values of each layer, `(1, H_kv, n, d)`.
    """

    logits: list[Tensor]
    states: list[Tensor]

    def difference(self, other: Answer, tolerance: float) -> str:
        """In what `other` differs, in a few words; empty if it is the same."""
        shapes = [[tuple(s.shape) for s in answer.states] for answer in (self, other)]
        if shapes[0] != shapes[1]:
            kept = [[shape[2] for shape in answer[::2]] for answer in shapes]
            return f"layers hold {kept[1]} slots, not {kept[0]}"
        for what in ("logits", "states"):
            for mine, theirs in zip(getattr(self, what), getattr(other, what), strict=True):
                off = float((mine - theirs).abs().max() / mine.abs().max())
                if not off <= tolerance:
                    return f"{what} off by {off:.2g} of the largest"
        return ""


def ask(run: Callable[..., Any], companion: Companion, by_hand: bool = False) -> Answer:
    """What `run` answers.

    Args:
        by_hand: whether to leave only the keys of least norm in the cache before the decode step.
    """
    if companion.answers:
        return Answer([run(IDS)], [])
    cache = DynamicCache()
    with torch.no_grad():
        logits = [run(IDS, past_key_values=cache).logits.clone()]
        if by_hand:
            _evict_by_hand(cache)
        states = [s.clone() for layer in cache.layers for s in _states(layer)]
        position = torch.tensor([[CONTEXT]])
        logits.append(run(NEXT, past_key_values=cache, position_ids=position).logits.clone())
    return Answer([x.float() for x in logits], [x.float() for x in states])


def _states(layer: Any) -> tuple[Tensor, Tensor]:
    if isinstance(layer, RaggedLayer):
        return layer.dense()[:2]
    return layer.keys, layer.values


def _evict_by_hand(cache: DynamicCache) -> None:
    for layer in cache.layers:
        kept = top_positions(-layer.keys.float().norm(dim=-1), n_kept(CONTEXT, RATIO))
        index = kept.unsqueeze(-1).expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = (s.gather(2, index) for s in (layer.keys, layer.values))


# ---- mechanisms ----------------------------------------------------------------------------------


def _own(package: Any, name: str) -> Callable[[], Any]:
    if name == "SnapKV":
        return lambda: package.SnapKVPress(RATIO, window_size=4)
    return lambda: package.AdaKVPress(package.KnormPress(RATIO))


def _of_rung(name: str) -> Callable[[], Any]:
    return lambda: LADDER[name].press(RATIO)


MECHANISMS: dict[str, Callable[[], Any]] = {
    "hooks": _of_rung("hooks"),
    "patches": _of_rung("patches"),
    "hooks, SnapKV": _own(hooks_impl, "SnapKV"),
    "patches, SnapKV": _own(patch_impl, "SnapKV"),
    "hooks, AdaKV": _own(hooks_impl, "AdaKV"),
    "patches, AdaKV": _own(patch_impl, "AdaKV"),
} | {name: _of_rung(name) for name in LADDER if name not in ("hooks", "patches")}
"""Ours with a press that reads keys alone, one that reads queries and a head-wise one; the other
rungs of the ladder with the first."""

OURS = tuple(name for name in MECHANISMS if name.split(",")[0] in ("hooks", "patches"))


def llama() -> PreTrainedModel:
    return build("llama", num_layers=2)


@lru_cache
def pressed(mechanism: str, companion: Companion) -> Answer:
    """What is right while the press is open.

    For keys of least norm, the companion's own cache is cut by hand. What SnapKV and AdaKV keep is
    taken from the other mechanism, opened on a model that the companion has finished with.
    """
    with companion.used(model := llama()) as run:
        if companion.answers or "," not in mechanism:
            return ask(run, companion, by_hand=True)
        package, name = mechanism.split(", ")
        with _own(patch_impl if package == "hooks" else hooks_impl, name)()(model):
            return ask(run, companion)


@lru_cache
def alone(companion: Companion) -> Answer:
    """What is right while no press is open."""
    with companion.used(llama()) as run:
        return ask(run, companion)


# ---- the matrix ----------------------------------------------------------------------------------


def try_out(mechanism: str, companion: Companion, phase: str) -> dict[str, Any]:
    """One cell of the matrix, as a row."""
    outcome, detail = RIGHT, ""
    with contained(llama()), _quiet():
        try:
            for when, run, beside, is_open in _looks(mechanism, companion, phase):
                right = pressed(mechanism, beside) if is_open else alone(beside)
                difference = right.difference(ask(run, beside), beside.tolerance)
                if difference and outcome == RIGHT:
                    outcome, detail = WRONG, f"{when}: {difference}"
        except Exception as error:  # whatever comes is the result
            if outcome == RIGHT:
                outcome, detail = ERROR, f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {
        "mechanism": mechanism,
        "companion": companion.name,
        "phase": phase,
        "outcome": outcome,
        "detail": detail,
    }


def _looks(
    mechanism: str, companion: Companion, phase: str
) -> Iterator[tuple[str, Callable[..., Any], Companion, bool]]:
    """When to look: what to run then, beside which companion, and whether the scope is open."""
    model = llama()
    scope, plain = MECHANISMS[mechanism]()(model), COMPANIONS[_NOTHING]
    if phase == BEFORE:
        with companion.used(model) as run:
            with scope:
                yield "inside", run, companion, True
            yield "after the scope", run, companion, False
    elif phase == INSIDE:
        with scope:
            with companion.used(model) as run:
                yield "inside", run, companion, True
            yield "inside, alone again", model, plain, True
        yield "after the scope", model, plain, False
    else:
        with scope:
            yield "inside, alone", model, plain, True
        with companion.used(model) as run:
            yield "after the scope", run, companion, False


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of libraries that notice each other."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def cells(mechanisms: list[str], companions: list[str]) -> list[tuple[str, Companion, str]]:
    """What is tried out: slow companions by our own mechanisms alone, and not after the scope."""
    return [
        (mechanism, COMPANIONS[companion], phase)
        for mechanism in mechanisms
        for companion in companions
        for phase in PHASES
        if not COMPANIONS[companion].is_slow or (mechanism in OURS and phase != AFTER)
    ]


def measure(
    mechanisms: list[str], companions: list[str] | None = None, *, progress: bool = True
) -> Tables:
    """Every mechanism beside every companion, in every phase.

    Returns:
        `coexistence`: columns `mechanism`, `companion`, `phase` (one of `PHASES`), `outcome` (one
        of `OUTCOMES`) and a `detail` of what is not right.
    """
    chosen = cells(mechanisms, companions or list(COMPANIONS))
    console = Console(stderr=True)
    rows = [
        try_out(*cell)
        for cell in track(chosen, "coexistence", console=console, disable=not progress)
    ]
    return {"coexistence": pd.DataFrame(rows)}


def run() -> Tables:
    """The study: everything."""
    return measure(list(MECHANISMS))


# ---- reading the table ---------------------------------------------------------------------------


_LOOKS = {
    RIGHT: ("\N{MIDDLE DOT}", "#e3eef4"),
    ERROR: ("error", "#f3c969"),
    WRONG: ("wrong", "#D55E00"),
}


def worst(table: pd.DataFrame) -> pd.Series:
    """By mechanism and companion, the worst outcome of all phases."""
    ranks = table["outcome"].map(OUTCOMES.index)
    grouped = ranks.groupby([table["companion"], table["mechanism"]], sort=False).max()
    return grouped.map(lambda rank: OUTCOMES[rank])


def figures(tables: Tables) -> dict[str, Figure]:
    """The matrix: `coexistence`."""
    table = tables["coexistence"]
    mechanisms, companions = (list(table[name].unique()) for name in ("mechanism", "companion"))
    looks = {pair: _LOOKS[outcome] for pair, outcome in worst(table).items()}
    with style():
        figure, (panel,) = new_figure(width=9.8, height=1.6 + 0.27 * len(companions))
        draw_cells(panel, companions, mechanisms, looks)  # type: ignore[arg-type]
        handles = [
            Line2D([], [], color=colour, marker="s", markersize=9, linestyle="none", label=name)
            for name, (_, colour) in _LOOKS.items()
        ]
        legend_outside(figure, panel, handles=handles)
    figure.set_label(
        "What comes of each mechanism (columns) beside what else is done to models (rows): the "
        "worst of before, inside and after the scope"
    )
    return {"coexistence": figure}


def summary(tables: Tables) -> str:
    """What was found, as Markdown."""
    table = tables["coexistence"]
    mechanisms, companions = (list(table[name].unique()) for name in ("mechanism", "companion"))
    found = worst(table)
    rows = [
        [companion, *(_short(found.get((companion, name), "not run")) for name in mechanisms)]
        for companion in companions
    ]
    lines = [sentence(table), "", markdown_table(["", *mechanisms], rows, left=None)]
    late = [m for m in mechanisms if found.get((_NOTHING, m), RIGHT) == WRONG]
    if late:
        lines += ["", f"Wrong by themselves, beside nothing else: {', '.join(late)}."]
    own = table[table["mechanism"].isin(OURS) & (table["outcome"] != RIGHT)]
    if not own.empty:
        lines += ["", "What is not right with this project's own:", ""]
        records: list[dict[Any, Any]] = own.to_dict("records")
        lines += [
            f"- {row['mechanism']}, {row['companion']}, {row['phase']} the scope: {row['detail']}"
            for row in records
        ]
    return "\n".join(lines)


def _short(outcome: str) -> str:
    return "" if outcome == RIGHT else outcome


def sentence(table: pd.DataFrame) -> str:
    """How many cells are right, those of this project first."""
    own = table[table["mechanism"].isin(OURS)]
    others = table[~table["mechanism"].isin(OURS)]

    def counted(part: pd.DataFrame) -> str:
        counts = part["outcome"].value_counts()
        named = [f"{counts[name]} {name}" for name in OUTCOMES if name in counts]
        return f"{', '.join(named)} (of {len(part)})"

    said = f"Hooks and patches of this project: {counted(own)}." if len(own) else ""
    return said + (f" The other mechanisms: {counted(others)}." if len(others) else "")


EXPERIMENT = Experiment(
    name="coexistence",
    title="Who gets along",
    question="Does a press still do what it should beside everything else that is done to models, "
    "and do the others?",
    run=run,
    figures=figures,
    summary=summary,
    repeat="python -m experiments coexistence",
)


# ---- command -------------------------------------------------------------------------------------


def command(
    mechanism: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeat it for several; by default all: {'; '.join(MECHANISMS)}."),
    ] = None,
    companion: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeat it for several; by default all: {'; '.join(COMPANIONS)}."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write the table and the figure to.")
    ] = None,
) -> None:
    """Each mechanism beside accelerate, PEFT, torch.compile and others."""
    _check_known("mechanism", mechanism, list(MECHANISMS))
    _check_known("companion", companion, list(COMPANIONS))
    tables = measure(mechanism or list(MECHANISMS), companion)
    table = tables["coexistence"]
    shown = Table(box=SIMPLE_HEAD)
    for column in ("mechanism", "companion", "phase", "outcome", "detail"):
        shown.add_column(column)
    records: list[dict[Any, Any]] = table[table["outcome"] != RIGHT].to_dict("records")
    for row in records:
        shown.add_row(*(str(value)[:160] for value in row.values()))
    console = Console()
    if records:
        console.print(shown)
    console.print(sentence(table))
    if output is not None:
        write_results(tables, figures(tables), output)


def _check_known(what: str, names: list[str] | None, known: list[str]) -> None:
    for name in names or []:
        if name not in known:
            raise UserError(f"no {what} is called {name!r}; there are {'; '.join(known)}")
