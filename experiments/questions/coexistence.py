"""Whether presses and everything else that is done to models get along.

Each mechanism meets each companion (`experiments.interventions`) that begins before its scope and
outlives it, that comes and goes inside of it, or that comes after it. What is kept, and the logits
of the prefill and of a decode step, are held against those that the companion gives without any
press, and, once the scope is closed, against those of the companion alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar

from transformers import DynamicCache, PreTrainedModel

from experiments.framework.experiment import Evidence, Finding, Tables
from experiments.framework.tables import ResultTable
from experiments.interventions import COMPANIONS, NOTHING, Intervention
from experiments.mechanisms import OURS, TRIED, scenarios
from experiments.testbed.compare import Response, random_tokens
from experiments.testbed.families import HYBRID, build
from press_core.budget import n_kept
from press_core.select import top_positions

BEFORE, INSIDE, AFTER = PHASES = ("before", "inside", "after")
"""When the companion comes: before the scope opens, inside of it, after it was closed."""

RIGHT, ERROR, WRONG = "right", scenarios.ERROR, "wrong"

# ---- answers -------------------------------------------------------------------------------------


def ask(run: Callable[..., Any], companion: Intervention, by_hand: bool = False) -> Response:
    """What `run` answers: a prefill, what the cache holds of it, and two decode steps.

    Args:
        by_hand: whether to leave only the keys of least norm in the cache before the decode steps.
    """
    if companion.answers:
        return Response([run(random_tokens(scenarios.CONTEXT))])
    cache = DynamicCache()
    logits = [x.clone() for x in scenarios.prefill(run, cache)]
    if by_hand:
        _evict_by_hand(cache)
    found = scenarios.decoded(run, cache, logits)
    return Response([x.float() for x in found.logits], [x.float() for x in found.states])


def _evict_by_hand(cache: DynamicCache) -> None:
    for layer in cache.layers:
        kept = top_positions(-layer.keys.float().norm(dim=-1), n_kept(scenarios.CONTEXT, 0.5))
        index = kept.unsqueeze(-1).expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = (s.gather(2, index) for s in (layer.keys, layer.values))


MINE = tuple(name for name in TRIED if name.partition(", ")[0] in OURS)
"""Ours, among what is tried."""


@dataclass(frozen=True)
class Options:
    """What to try."""

    mechanism: Annotated[tuple[str, ...], scenarios.some_of(TRIED)] = ()
    companion: Annotated[tuple[str, ...], scenarios.some_of(COMPANIONS)] = ()
    family: scenarios.Family = "llama"


def small(family: str) -> PreTrainedModel:
    return build(family, num_layers=1 if family in HYBRID else 2)


@lru_cache
def pressed(mechanism: str, companion: str, family: str) -> Response:
    """What is right while the press is open.

    For keys of least norm, the companion's own cache is cut by hand. What SnapKV and AdaKV keep,
    and what a model keeps some of whose layers have a window, is taken from the other mechanism,
    opened on a model that the companion has finished with. What has no cache is as without a press.
    """
    beside = COMPANIONS[companion]
    if beside.answers:
        return alone(companion, family)
    with beside.scope(model := small(family)) as run:
        if "," not in mechanism and family not in HYBRID:
            return ask(run, beside, by_hand=True)
        package, comma, name = mechanism.partition(", ")
        other = "patches" if package == "hooks" else "hooks"
        with TRIED[f"{other}{comma}{name}"](model):
            return ask(run, beside)


@lru_cache
def alone(companion: str, family: str) -> Response:
    """What is right while no press is open."""
    with COMPANIONS[companion].scope(small(family)) as run:
        return ask(run, COMPANIONS[companion])


# ---- the matrix ----------------------------------------------------------------------------------


class Coexistence(scenarios.Scenarios[Options]):
    """Try each mechanism beside accelerate, PEFT, torch.compile and others.

    Do presses, and other libraries that change models, still do what they should beside each
    other?

    Each mechanism meets each companion three times: begun before its scope and still there
    after it, begun and ended inside it, and begun after it. What is kept, and the logits of a
    prefill and of a decode step, are compared with those of the companion without a press and a
    cache cut by hand; once the scope is closed, with the companion alone. Wrong means silently
    wrong: nothing was raised. Other versions of the libraries may behave otherwise.
    """

    name = "coexistence"
    title = "Beside other libraries"
    evidence = Evidence.REFERENCE
    full = Options()
    quick = Options(
        mechanism=(*OURS, *(f"{name}, AdaKV" for name in OURS)),
        companion=tuple(n for n, done in COMPANIONS.items() if not done.is_slow),
    )

    columns = ("mechanism", "companion", "phase")
    looks: ClassVar = {
        RIGHT: ("\N{MIDDLE DOT}", "#e3eef4"),
        ERROR: ("!", "#f3c969"),
        WRONG: ("x", "#D55E00"),
    }
    shows = (
        "What comes of each mechanism (columns) beside what else is done to models (rows): "
        "the worst of before, inside and after the scope"
    )
    seconds = 20

    def cells(self, options: Options) -> list[tuple[str, ...]]:
        """Slow companions are tried by our own mechanisms alone, and not after the scope."""
        return [
            (mechanism, companion, phase)
            for mechanism in options.mechanism or TRIED
            for companion in options.companion or COMPANIONS
            for phase in PHASES
            if not COMPANIONS[companion].is_slow or (mechanism in MINE and phase != AFTER)
        ]

    def scenario(
        self, mechanism: str, companion: str, phase: str, family: str
    ) -> Iterator[scenarios.Moment]:
        """The model, or what the companion gives in its place, inside of the scope and after it."""
        model = small(family)
        scope, begun = TRIED[mechanism](model), COMPANIONS[companion].scope

        def moment(
            when: str, run: Callable[..., Any] = model, beside: str = NOTHING
        ) -> scenarios.Moment:
            is_open, done = when.startswith("inside"), COMPANIONS[beside]
            right = pressed(mechanism, beside, family) if is_open else alone(beside, family)
            return scenarios.Moment(when, right, partial(ask, run, done), done.tolerance)

        if phase == BEFORE:
            with begun(model) as run:
                with scope:
                    yield moment("inside", run, companion)
                yield moment("after the scope", run, companion)
        elif phase == INSIDE:
            with scope:
                with begun(model) as run:
                    yield moment("inside", run, companion)
                yield moment("inside, alone again")
            yield moment("after the scope")
        else:
            with scope:
                yield moment("inside, alone")
            with begun(model) as run:
                yield moment("after the scope", run, companion)

    def wrong(self, when: str) -> str:
        return WRONG

    def findings(self, tables: Tables) -> list[Finding]:
        table, found = tables["coexistence"], []
        for others, part in table.groupby(~table["mechanism"].isin(MINE)):
            wrong, errors = ((part["outcome"] == outcome).sum() for outcome in (WRONG, ERROR))
            who = "the other mechanisms" if others else "hooks and patches of this project"
            text = (
                f"Beside other libraries, {who} are silently wrong in "
                f"**{wrong}** of {len(part)} trials and raise an error in {errors}."
            )
            need = "use presses beside accelerate, PEFT and torch.compile"
            works: Any = "breaks" if wrong else "costs" if errors else "works"
            found.append(Finding("others", text) if others else Finding("own", text, need, works))
        return found

    def views(self, tables: Tables) -> list[ResultTable]:
        return [self.matrix(tables).table("The worst of before, inside and after the scope.")]

    def remarks(self, tables: Tables) -> list[str]:
        """What is wrong beside nothing else, and what is not right with our own."""
        table = tables["coexistence"]
        by_itself = (table["companion"] == NOTHING) & (table["outcome"] == WRONG)
        ours = table["mechanism"].isin(MINE) & (table["outcome"] != RIGHT)
        noted = table[by_itself | ours]
        lines = [
            f"- {row.mechanism}, {row.companion}, {row.phase} the scope: {row.detail}"
            for row in noted.itertuples()
        ]
        return ["\n".join(lines)] if lines else []


EXPERIMENT = Coexistence()
