"""Which other models, copies, caches and threads a press on one model affects.

Every mechanism (`experiments.mechanisms`) is opened on a model in every situation below. Bystanders
run the same prefill and two decode steps before, inside and after the scope, and their logits and
caches are compared bit for bit. Weights and tokens are drawn from fixed seeds, and models are built
anew for every cell.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch
from transformers import DynamicCache, PreTrainedModel

from experiments.framework.experiment import Claim, Contrast, Evidence, Finding, Tables
from experiments.framework.tables import ResultTable
from experiments.mechanisms import MECHANISMS, OURS, contained, scenarios
from experiments.mechanisms.scenarios import ERROR, Moment
from experiments.testbed.compare import Response
from experiments.testbed.families import build
from press_core import attention_sites

RATIO, OTHER_RATIO = 0.5, 0.25
INSIDE, AFTER = "inside", "after"

UNTOUCHED, RECOVERS, FOR_GOOD = "untouched", "changed, recovers", "changed for good"
"""Outcomes for a bystander, besides `ERROR`, inside or after: the same bits inside and after the
scope; other bits inside only; other bits after the scope."""


@dataclass(frozen=True)
class Options:
    """Which mechanisms to test, on which architecture."""

    mechanism: Annotated[tuple[str, ...], scenarios.some_of(MECHANISMS)] = ()
    family: scenarios.Family = "llama"


# ---- answers -----------------------------------------------------------------------------------


def in_thread(model: PreTrainedModel) -> Response:
    """`scenarios.answer` of the model, run in a new thread that opened no scope."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(scenarios.answer, model).result()


# ---- situations --------------------------------------------------------------------------------


Press = Callable[[float], Any]
"""Makes a press from a compression ratio."""

Make = Callable[[int], PreTrainedModel]
"""Makes a small model from a seed; all models are of one family."""

Others = Callable[[PreTrainedModel, Make], list[PreTrainedModel]]
Answers = Callable[[PreTrainedModel], Response]


def _moments(
    when: str, expected: dict[PreTrainedModel, Response], run: Answers = scenarios.answer
) -> Iterator[Moment]:
    return (Moment(when, right, partial(run, model)) for model, right in expected.items())


def _bystanders(
    others: Others, press: Press, make: Make, run: Answers = scenarios.answer
) -> Iterator[Moment]:
    """Models other than the one that the press is open on."""
    model = make(0)
    expected = {other: scenarios.answer(other) for other in others(model, make)}
    with press(RATIO)(model):
        scenarios.answer(model)
        yield from _moments(INSIDE, expected, run)
    yield from _moments(AFTER, expected, run)


def _of_other_classes(model: PreTrainedModel, make: Make) -> list[PreTrainedModel]:
    others = map(build, ("mistral", "qwen3", "gpt_neox"))
    return [other for other in others if type(other) is not type(model)]


def _with_its_config(model: PreTrainedModel, make: Make) -> list[PreTrainedModel]:
    with torch.random.fork_rng(devices=[]):
        other = type(model)(model.config).eval()
    other.load_state_dict(make(1).state_dict())
    return [other]


def _with_its_module(model: PreTrainedModel, make: Make) -> list[PreTrainedModel]:
    other, name = make(1), attention_sites(model)[0].name
    layer, _, attention = name.rpartition(".")
    setattr(other.get_submodule(layer), attention, model.get_submodule(name))
    return [other]


def _itself(press: Press, make: Make, copied: bool = False) -> Iterator[Moment]:
    """The model after the press is closed, or a deep copy of it made while the press is open."""
    model = make(0)
    expected = {model: scenarios.answer(model)}
    with press(RATIO)(model):
        scenarios.answer(model)
        if copied:
            expected = {copy.deepcopy(model): expected[model]}
            yield from _moments(INSIDE, expected)
    yield from _moments(AFTER, expected)


def _pruned_and_whole_cache(press: Press, make: Make) -> Iterator[Moment]:
    """Decode two caches after the scope: one pruned inside it, one filled after it."""

    def pruned(model: PreTrainedModel) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        with press(RATIO)(model):
            scenarios.prefill(model, cache)
        return cache

    model = make(0)
    whole_alone = scenarios.answer(model)
    with contained(model):
        pruned_alone = scenarios.decoded(make(0), pruned(make(0)))
    first, second = pruned(model), DynamicCache(config=model.config)
    logits = scenarios.prefill(model, second)
    yield Moment(AFTER, pruned_alone, partial(scenarios.decoded, model, first))
    yield Moment(AFTER, whole_alone, lambda: scenarios.decoded(model, second, logits))


def _one_press_on_two_models(press: Press, make: Make) -> Iterator[Moment]:
    """Open one press on two models: each has to prune as it does with the press open on it only."""
    opens, models = press(RATIO), (make(0), make(1))
    bare = {model: scenarios.answer(model) for model in models}
    alone = {model: _alone(opens, model) for model in models}
    with opens(models[0]), opens(models[1]):
        yield from _moments(INSIDE, alone)
    yield from _moments(AFTER, bare)


def _alone(opens: Any, model: PreTrainedModel) -> Response:
    """`scenarios.answer` with only this press open, on a deep copy that is then discarded."""
    twin = copy.deepcopy(model)
    with contained(twin), opens(twin):
        return scenarios.answer(twin)


def _nested(press: Press, make: Make) -> Iterator[Moment]:
    """Open two scopes on one model and close the outer one first."""
    model, opens_outer, opens_inner = make(0), press(RATIO), press(OTHER_RATIO)
    bare, inner_alone = scenarios.answer(model), _alone(opens_inner, model)

    def closed(scope: Any) -> Response:
        scope.__exit__(None, None, None)
        return scenarios.answer(model)

    with contained(model):
        outer, inner = opens_outer(model), opens_inner(model)
        outer.__enter__()
        inner.__enter__()
        yield Moment(INSIDE, inner_alone, partial(closed, outer))
        yield Moment(AFTER, bare, partial(closed, inner))


SITUATIONS: dict[str, Callable[[Press, Make], Iterator[Moment]]] = {
    "the model, after": _itself,
    "instances of the class": partial(_bystanders, lambda _, make: [make(1), make(2), make(3)]),
    "instances of other classes": partial(_bystanders, _of_other_classes),
    "an instance in another thread": partial(_bystanders, lambda _, make: [make(1)], run=in_thread),
    "an instance with the same config": partial(_bystanders, _with_its_config),
    "an instance with the same module": partial(_bystanders, _with_its_module),
    "a deep copy made before": partial(_bystanders, lambda model, _: [copy.deepcopy(model)]),
    "a deep copy made inside": partial(_itself, copied=True),
    "two caches, one of them pruned": _pruned_and_whole_cache,
    "one press on two models": _one_press_on_two_models,
    "two scopes, the outer closed first": _nested,
}
"""Scenarios by name: what the press is opened on, and the bystanders that are compared."""


# ---- reading the table -------------------------------------------------------------------------


class Isolation(scenarios.Scenarios[Options]):
    """Test which bystanders a press on one model changes, mechanism by mechanism.

    With a press open on one model, which other models, copies, caches and threads give different
    results, and which recover after the scope?

    In each situation a press is opened on a small model, and bystanders (models, copies, caches
    or threads that it should not affect) run the same prefill and two decode steps before,
    inside and after its scope. Their logits and caches are compared bit for bit, and the worst
    outcome of all bystanders counts. Mechanisms other than hooks and patches are tried in their
    simplest form: with more code, some could recognize the calls of other models.
    """

    name = "isolation"
    title = "Who else is affected"
    evidence = Evidence.BITS
    full = quick = Options()
    claims: ClassVar = {"bystanders": Claim(quick)}
    columns = ("mechanism", "situation")
    looks: ClassVar = {
        UNTOUCHED: ("\N{MIDDLE DOT}", "#e3eef4"),
        RECOVERS: ("in", "#f3c969"),
        FOR_GOOD: ("on", "#D55E00"),
        ERROR: ("!", "#444444"),
    }
    shows = "Outcome for bystanders, compared bit for bit, by situation (rows) and mechanism"
    seconds = 3
    on_own_model: ClassVar = {"mechanism": OURS}

    def cells(self, options: Options) -> list[tuple[str, ...]]:
        return list(product(options.mechanism or MECHANISMS, SITUATIONS))

    def scenario(self, mechanism: str, situation: str, family: str) -> Iterator[Moment]:
        return SITUATIONS[situation](MECHANISMS[mechanism], lambda seed: build(family, seed=seed))

    def wrong(self, when: str) -> str:
        return FOR_GOOD if when == AFTER else RECOVERS

    def findings(self, tables: Tables) -> list[Finding]:
        table = tables["isolation"]
        total, (own, others) = table["situation"].nunique(), _untouched(table)
        who = " and ".join(own.index) or "these mechanisms"
        least = own.min() if len(own) else others.min()
        text = f"With {who}, bystanders give the same bits in **{least}** of {total} situations"
        if len(own) and len(others):
            text += f"; with other mechanisms in {others.min()} to {others.max()}"
        stays = table["mechanism"].isin(OURS) & table["outcome"].isin([FOR_GOOD, ERROR])
        need = "leave other models, copies and caches alone"
        verdict: Any = ("breaks" if stays.any() else "works") if len(own) else None
        return [Finding("bystanders", f"{text}.", need, verdict)]

    def views(self, tables: Tables) -> list[ResultTable]:
        note = "Outcome for bystanders; blank: the same bits inside and after the scope."
        return [self.matrix(tables).table(note)]

    def contrasts(self, tables: Tables) -> list[Contrast]:
        table = tables["isolation"]
        own, others = _untouched(table)
        title = f"Situations with no bystander affected, of {table['situation'].nunique()}"
        return [Contrast(title, pd.concat([own, others.nsmallest(1)]).astype(float).to_dict())]


def _untouched(table: pd.DataFrame) -> tuple[pd.Series[Any], pd.Series[Any]]:
    """Number of situations with no bystander affected: of our mechanisms, and of the others."""
    untouched = (table["outcome"] == UNTOUCHED).groupby(table["mechanism"], sort=False).sum()
    ours = untouched.index.isin(OURS)
    return untouched[ours], untouched[~ours]


EXPERIMENT = Isolation()
