"""Whether presses and everything else that is done to models get along.

Each mechanism meets each companion (`experiments.interventions`) that begins before its scope and
outlives it, that comes and goes inside of it, or that comes after it. What is kept, and the logits
of the prefill and of a decode step, are held against those that the companion gives without any
press, and, once the scope is closed, against those of the companion alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
import patch_impl
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Experiment, Finding, Tables
from experiments.framework.heatmap import OutcomeMatrix
from experiments.framework.options import one_of
from experiments.framework.own_model import SMALL, LeftOutError, OwnModel, Planned
from experiments.framework.tables import ResultTable
from experiments.framework.wording import in_one_line
from experiments.interventions import COMPANIONS, NOTHING, Intervention
from experiments.mechanisms import MECHANISMS, OURS
from experiments.mechanisms.contain import contained
from experiments.testbed.families import FAMILIES, HYBRID, build
from experiments.testbed.response import Response, random_tokens, states_of
from press_core.budget import n_kept
from press_core.select import top_positions

RATIO, CONTEXT = 0.5, 24
BEFORE, INSIDE, AFTER = PHASES = ("before", "inside", "after")
"""When the companion comes: before the scope opens, inside of it, after it was closed."""

RIGHT, ERROR, WRONG = OUTCOMES = ("right", "error", "wrong")

# ---- answers -------------------------------------------------------------------------------------


def ask(run: Callable[..., Any], companion: Intervention, by_hand: bool = False) -> Response:
    """What `run` answers: a prefill, what the cache holds of it, and a decode step.

    Args:
        by_hand: whether to leave only the keys of least norm in the cache before the decode step.
    """
    context, following = random_tokens(CONTEXT + 1).split(CONTEXT, dim=1)
    if companion.answers:
        return Response([run(context)])
    cache = DynamicCache()
    with torch.no_grad():
        logits = [run(context, past_key_values=cache).logits.clone()]
        if by_hand:
            _evict_by_hand(cache)
        states = states_of(cache)
        position = torch.tensor([[CONTEXT]])
        logits.append(run(following, past_key_values=cache, position_ids=position).logits.clone())
    return Response([x.float() for x in logits], [x.float() for x in states])


def _evict_by_hand(cache: DynamicCache) -> None:
    for layer in cache.layers:
        kept = top_positions(-layer.keys.float().norm(dim=-1), n_kept(CONTEXT, RATIO))
        index = kept.unsqueeze(-1).expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = (s.gather(2, index) for s in (layer.keys, layer.values))


# ---- mechanisms ----------------------------------------------------------------------------------


def _presses(name: str) -> dict[str, Callable[[], Any]]:
    """A mechanism of this project with presses that read keys, queries, and keep heads apart."""
    package = {"hooks": hooks_impl, "patches": patch_impl}[name]
    return {
        name: partial(MECHANISMS[name].press, RATIO),
        f"{name}, SnapKV": lambda: package.SnapKVPress(RATIO, window_size=4),
        f"{name}, AdaKV": lambda: package.AdaKVPress(package.KnormPress(RATIO)),
    }


_HOOKS, _PATCHES = _presses("hooks"), _presses("patches")
MINE = tuple(name for pair in zip(_HOOKS, _PATCHES, strict=True) for name in pair)
TRIED: dict[str, Callable[[], Any]] = {
    **{name: (_HOOKS | _PATCHES)[name] for name in MINE},
    **{name: partial(mechanism.press, RATIO) for name, mechanism in MECHANISMS.items()},
}
"""What makes the press that is tried, by name: ours, and the other mechanisms."""


@dataclass(frozen=True)
class Options:
    """What to try."""

    mechanism: Annotated[
        tuple[str, ...],
        typer.Option(
            help=f"Repeatable; one of: {'; '.join(TRIED)}.",
            show_default="all",
            callback=one_of(TRIED),
        ),
    ] = ()
    companion: Annotated[
        tuple[str, ...],
        typer.Option(
            help=f"Repeatable; one of: {'; '.join(COMPANIONS)}.",
            show_default="all",
            callback=one_of(COMPANIONS),
        ),
    ] = ()
    family: Annotated[
        str, typer.Option(help="Architecture of the model.", callback=one_of(FAMILIES))
    ] = "llama"


def small(family: str) -> PreTrainedModel:
    return build(family, num_layers=1 if family in HYBRID else 2)


@lru_cache
def pressed(mechanism: str, companion: Intervention, family: str) -> Response:
    """What is right while the press is open.

    For keys of least norm, the companion's own cache is cut by hand. What SnapKV and AdaKV keep,
    and what a model keeps some of whose layers have a window, is taken from the other mechanism,
    opened on a model that the companion has finished with. What has no cache is as without a press.
    """
    if companion.answers:
        return alone(companion, family)
    with companion.scope(model := small(family)) as run:
        if "," not in mechanism and family not in HYBRID:
            return ask(run, companion, by_hand=True)
        package, comma, name = mechanism.partition(", ")
        other = "patches" if package == "hooks" else "hooks"
        with TRIED[f"{other}{comma}{name}"]()(model):
            return ask(run, companion)


@lru_cache
def alone(companion: Intervention, family: str) -> Response:
    """What is right while no press is open."""
    with companion.scope(small(family)) as run:
        return ask(run, companion)


# ---- the matrix ----------------------------------------------------------------------------------


def try_out(
    mechanism: str, companion: Intervention, phase: str, family: str = "llama"
) -> dict[str, Any]:
    """One cell of the matrix, as a row."""
    outcome, detail = RIGHT, ""
    with contained(small(family)), _quiet():
        try:
            for when, run, beside, is_open in _moments(mechanism, companion, phase, small(family)):
                right = pressed(mechanism, beside, family) if is_open else alone(beside, family)
                difference = right.difference(ask(run, beside), beside.tolerance)
                if difference and outcome == RIGHT:
                    outcome, detail = WRONG, f"{when}: {difference}"
        except Exception as error:  # whatever comes is the result
            if outcome == RIGHT:
                outcome, detail = ERROR, in_one_line(error)
    return {
        "mechanism": mechanism,
        "companion": companion.companion,
        "phase": phase,
        "outcome": outcome,
        "detail": detail,
    }


def _moments(
    mechanism: str, companion: Intervention, phase: str, model: PreTrainedModel
) -> Iterator[tuple[str, Callable[..., Any], Intervention, bool]]:
    """When to look: what to run then, beside which companion, and whether the scope is open."""
    scope, plain = TRIED[mechanism]()(model), NOTHING
    if phase == BEFORE:
        with companion.scope(model) as run:
            with scope:
                yield "inside", run, companion, True
            yield "after the scope", run, companion, False
    elif phase == INSIDE:
        with scope:
            with companion.scope(model) as run:
                yield "inside", run, companion, True
            yield "inside, alone again", model, plain, True
        yield "after the scope", model, plain, False
    else:
        with scope:
            yield "inside, alone", model, plain, True
        with companion.scope(model) as run:
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


def cells(
    mechanisms: Iterable[str], companions: Iterable[str]
) -> list[tuple[str, Intervention, str]]:
    """What is tried out: slow companions by our own mechanisms alone, and not after the scope."""
    return [
        (mechanism, COMPANIONS[companion], phase)
        for mechanism in mechanisms
        for companion in companions
        for phase in PHASES
        if not COMPANIONS[companion].is_slow or (mechanism in MINE and phase != AFTER)
    ]


# ---- reading the table ---------------------------------------------------------------------------


_LOOKS = {
    RIGHT: ("\N{MIDDLE DOT}", "#e3eef4"),
    ERROR: ("!", "#f3c969"),
    WRONG: ("x", "#D55E00"),
}


class Coexistence(Experiment[Options]):
    """Try each mechanism beside accelerate, PEFT, torch.compile and others."""

    name = "coexistence"
    title = "Beside other libraries"
    question = (
        "Do presses, and other libraries that change models, still do what they should beside each "
        "other?"
    )
    method = (
        "Each mechanism meets each companion three times: begun before its scope and still there "
        "after it, begun and ended inside it, and begun after it. What is kept, and the logits of "
        "a prefill and of a decode step, are compared with those of the companion without a press "
        "and a cache cut by hand; once the scope is closed, with the companion alone. Wrong means "
        "silently wrong: nothing was raised. Other versions of the libraries may behave "
        "otherwise."
    )
    evidence = Evidence.REFERENCE
    full = Options()
    quick = Options(
        mechanism=(*OURS, *(f"{name}, AdaKV" for name in OURS)),
        companion=tuple(n for n, done in COMPANIONS.items() if not done.is_slow),
    )

    def on(self, own: OwnModel) -> Planned[Options]:
        if own.model_type not in FAMILIES:
            raise LeftOutError(f"it builds no small model of the type {own.model_type}")
        return Planned(replace(self.quick, family=own.model_type), seconds=20, note=SMALL)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Every mechanism beside every companion, in every phase.

        Returns:
            `coexistence`: columns `mechanism`, `companion`, `phase` (one of `PHASES`), `outcome`
            (one of `OUTCOMES`) and a `detail` of what is not right.
        """
        chosen = cells(options.mechanism or TRIED, options.companion or COMPANIONS)
        rows = [
            try_out(*cell, options.family) for cell in progress.track(chosen, description=self.name)
        ]
        return {"coexistence": pd.DataFrame(rows)}

    def findings(self, tables: Tables) -> list[Finding]:
        table = tables["coexistence"]
        parts = {"own": table[_is_own(table)], "others": table[~_is_own(table)]}
        return [_finding(name, part) for name, part in parts.items() if len(part)]

    def views(self, tables: Tables) -> list[ResultTable]:
        table = tables["coexistence"]
        note = "The worst of before, inside and after the scope."
        return [OutcomeMatrix.of(table, "companion", _LOOKS).table(note)]

    def remarks(self, tables: Tables) -> list[str]:
        table, said = tables["coexistence"], []
        alone = table[(table["companion"] == NOTHING.companion) & (table["outcome"] == WRONG)]
        if len(alone):
            late = ", ".join(alone["mechanism"].unique())
            said = [f"Wrong by themselves, beside nothing else: {late}."]
        own = table[_is_own(table) & (table["outcome"] != RIGHT)]
        details = [
            f"- {row.mechanism}, {row.companion}, {row.phase} the scope: {row.detail}"
            for row in own.itertuples()
        ]
        if details:
            said += ["What is not right with this project's own:", "\n".join(details)]
        return said

    def figures(self, tables: Tables) -> dict[str, Figure]:
        label = (
            "What comes of each mechanism (columns) beside what else is done to models (rows): "
            "the worst of before, inside and after the scope"
        )
        matrix = OutcomeMatrix.of(tables["coexistence"], "companion", _LOOKS)
        return {"coexistence": matrix.figure(label)}


def _is_own(table: pd.DataFrame) -> pd.Series[bool]:
    return table["mechanism"].isin(MINE)


def _finding(name: str, part: pd.DataFrame) -> Finding:
    counts = {outcome: int((part["outcome"] == outcome).sum()) for outcome in OUTCOMES}
    who = {"own": "hooks and patches of this project", "others": "the other mechanisms"}[name]
    text = (
        f"Beside other libraries, {who} are silently wrong in "
        f"**{counts[WRONG]}** of {len(part)} trials and raise an error in {counts[ERROR]}."
    )
    if name == "others":
        return Finding(name, text)
    verdict: Any = "breaks" if counts[WRONG] else "costs" if counts[ERROR] else "works"
    return Finding(name, text, "use presses beside accelerate, PEFT and torch.compile", verdict)


EXPERIMENT = Coexistence()
