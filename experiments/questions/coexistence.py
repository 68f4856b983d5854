"""Whether presses work together with other libraries that change models.

Each mechanism is combined with each companion (`experiments.interventions`) in three phases: the
companion is applied before the press's scope opens and removed after it closes, applied and removed
inside the scope, or applied after the scope has closed. Logits of the prefill and of two decode
steps, and the cache, are compared with a reference: inside the scope with `pressed`, outside of it
with the companion without a press, `alone`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar

from transformers import DynamicCache

from experiments.framework.experiment import Evidence, Finding, Tables
from experiments.framework.tables import ResultTable
from experiments.framework.wording import sentences
from experiments.interventions import COMPANIONS, NOTHING, Intervention
from experiments.mechanisms import OURS, TRIED, scenarios
from experiments.testbed.compare import Response, random_tokens
from experiments.testbed.families import HYBRID, small
from press_core.budget import n_kept
from press_core.select import top_positions

BEFORE, INSIDE, AFTER = PHASES = ("before", "inside", "after")
"""When the companion is applied: before the scope opens, inside it, or after it has closed."""

RIGHT, ERROR, WRONG = "right", scenarios.ERROR, "wrong"

# ---- answers -------------------------------------------------------------------------------------


def respond(run: Callable[..., Any], companion: Intervention, by_hand: bool = False) -> Response:
    """Logits of a prefill and of two decode steps, and the cache after them.

    Args:
        run: the model, or what the companion yields to run instead of it.
        by_hand: whether to evict all but the keys of smallest norm between prefill and decoding.
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


_finding = sentences(__file__)

MINE = tuple(name for name in TRIED if name.partition(", ")[0] in OURS)
"""The mechanisms of this project, among all that are tested."""


@dataclass(frozen=True)
class Options:
    """Which mechanisms and companions to combine, on which architecture."""

    mechanism: Annotated[tuple[str, ...], scenarios.some_of(TRIED)] = ()
    companion: Annotated[tuple[str, ...], scenarios.some_of(COMPANIONS)] = ()
    family: scenarios.Family = "llama"


@lru_cache
def pressed(mechanism: str, companion: str, family: str) -> Response:
    """The reference while the press is open.

    For presses that keep the keys of smallest norm, the companion runs without a press and its
    cache is pruned by hand. For SnapKV, AdaKV and models with sliding-window layers, it is the same
    press with the other mechanism, opened on a model after the companion was applied. A companion
    that does not use a cache has to answer as without a press.
    """
    beside = COMPANIONS[companion]
    if beside.answers:
        return alone(companion, family)
    with beside.scope(model := small(family)) as run:
        if "," not in mechanism and family not in HYBRID:
            return respond(run, beside, by_hand=True)
        package, comma, name = mechanism.partition(", ")
        other = "patches" if package == "hooks" else "hooks"
        with TRIED[f"{other}{comma}{name}"](model):
            return respond(run, beside)


@lru_cache
def alone(companion: str, family: str) -> Response:
    """The reference while no press is open."""
    with COMPANIONS[companion].scope(small(family)) as run:
        return respond(run, COMPANIONS[companion])


# ---- the matrix ----------------------------------------------------------------------------------


class Coexistence(scenarios.Scenarios[Options]):
    """Test each mechanism together with accelerate, PEFT, torch.compile and other libraries.

    Do presses still prune correctly, and do other libraries that change models still work, when
    both are used on one model?

    Each mechanism is combined with each companion library in three phases: applied before the
    press's scope and removed after it, applied and removed inside the scope, and applied after
    the scope. While the press is open, the logits of a prefill and of two decode steps, and the
    cache, are compared with the companion without a press and a cache pruned by hand, or, for
    SnapKV and AdaKV, with the same press installed by the other mechanism; after the scope, with
    the companion alone. Wrong means silently wrong: no error was raised. The other mechanisms are
    in their simplest form, and a permanent class patch is wrong after its scope even with nothing
    beside it. torch.compile captures graphs, and runs them op by op (its `eager` back end). The
    models are small and random, and other versions of the libraries may behave differently.
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
        "Each mechanism (columns) combined with each companion (rows): the worst outcome of the "
        "companion applied before, inside and after the scope"
    )
    seconds = 20

    def cells(self, options: Options) -> list[tuple[str, ...]]:
        """Slow companions are combined only with our mechanisms, and not after the scope."""
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
        """Compare the model, or what the companion yields for it, inside the scope and after it."""
        model = small(family)
        scope, begun = TRIED[mechanism](model), COMPANIONS[companion].scope

        def moment(
            when: str, run: Callable[..., Any] = model, beside: str = NOTHING
        ) -> scenarios.Moment:
            is_open, done = when.startswith("inside"), COMPANIONS[beside]
            right = pressed(mechanism, beside, family) if is_open else alone(beside, family)
            return scenarios.Moment(when, right, partial(respond, run, done), done.tolerance)

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
        table = table[table["companion"] != NOTHING]
        for others, part in table.groupby(~table["mechanism"].isin(MINE)):
            wrong, errors = (part[part["outcome"] == outcome] for outcome in (WRONG, ERROR))
            of_one = [
                f" ({n} with {name})" for name, n in wrong["mechanism"].value_counts().items()
            ]
            said: dict[str, Any] = {"wrong": len(wrong), "n": len(part), "errors": len(errors)}
            said["most"] = "".join(of_one[:1])
            verdict = "breaks" if len(wrong) else "costs" if len(errors) else "works"
            found.append(_finding("others", **said) if others else _finding("own", verdict, **said))
        return found

    def views(self, tables: Tables) -> list[ResultTable]:
        """The outcomes; mechanisms that are wrong without any companion, and failures of ours."""
        table = tables["coexistence"]
        by_itself = (table["companion"] == NOTHING) & (table["outcome"] == WRONG)
        ours = table["mechanism"].isin(MINE) & (table["outcome"] != RIGHT)
        lines = [
            f"- {row.mechanism}, {row.companion}, {row.phase} the scope: {row.detail}"
            for row in table[by_itself | ours].itertuples()
        ]
        outcomes = self.matrix(tables).table("The worst outcome of the three phases.")
        return [outcomes, *([ResultTable("\n".join(lines))] if lines else [])]


EXPERIMENT = Coexistence()
