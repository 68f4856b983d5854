"""Who else feels it when a press is opened on one model.

Every mechanism (`experiments.mechanisms`) is opened on a model in every situation below, and
bystanders are asked the same question before, inside and after: a prefill and two decode steps,
with the cache that these leave. Answers are compared bit for bit. Weights and tokens are drawn from
fixed seeds, and models are built anew for every cell.
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
from experiments.mechanisms.scenarios import Moment
from experiments.testbed.compare import Response
from experiments.testbed.families import build
from press_core import attention_sites

RATIO, OTHER_RATIO = 0.5, 0.25
INSIDE, AFTER = "inside", "after"

UNTOUCHED, RECOVERS, FOR_GOOD = "untouched", "changed, recovers", "changed for good"
ERROR = scenarios.ERROR
"""What becomes of a bystander: it answers as ever, inside and after; differently inside only;
differently after; it raises an error, inside or after."""


@dataclass(frozen=True)
class Options:
    """What to try."""

    mechanism: Annotated[tuple[str, ...], scenarios.some_of(MECHANISMS)] = ()
    family: scenarios.Family = "llama"


# ---- answers -----------------------------------------------------------------------------------


def in_thread(model: PreTrainedModel) -> Response:
    """What the model answers in a thread that knows nothing of any scope."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(scenarios.answer, model).result()


# ---- situations --------------------------------------------------------------------------------


Press = Callable[[float], Any]
"""From a compression ratio to what is opened on a model."""

Make = Callable[[int], PreTrainedModel]
"""From a seed to a small model; all are of one family."""

Others = Callable[[PreTrainedModel, Make], list[PreTrainedModel]]
Answers = Callable[[PreTrainedModel], Response]


def _asked(
    when: str, rights: dict[PreTrainedModel, Response], ask: Answers = scenarios.answer
) -> Iterator[Moment]:
    return (Moment(when, right, partial(ask, model)) for model, right in rights.items())


def _bystanders(
    others: Others, press: Press, make: Make, ask: Answers = scenarios.answer
) -> Iterator[Moment]:
    """Other models than the one that the press is open on."""
    model = make(0)
    rights = {other: scenarios.answer(other) for other in others(model, make)}
    with press(RATIO)(model):
        scenarios.answer(model)
        yield from _asked(INSIDE, rights, ask)
    yield from _asked(AFTER, rights, ask)


def _of_the_class(model: PreTrainedModel, make: Make) -> list[PreTrainedModel]:
    return [make(seed) for seed in (1, 2, 3)]


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
    """The model once the press is closed, or a copy that is made while it is open."""
    model = make(0)
    rights = {model: scenarios.answer(model)}
    with press(RATIO)(model):
        scenarios.answer(model)
        if copied:
            rights = {copy.deepcopy(model): rights[model]}
            yield from _asked(INSIDE, rights)
    yield from _asked(AFTER, rights)


def _pruned_and_whole_cache(press: Press, make: Make) -> Iterator[Moment]:
    """A cache pruned inside and one filled after, decoded in turn once the scope is closed."""

    def pruned(model: PreTrainedModel) -> DynamicCache:
        cache = DynamicCache()
        with press(RATIO)(model):
            scenarios.prefill(model, cache)
        return cache

    model = make(0)
    whole_alone = scenarios.answer(model)
    with contained(model):
        pruned_alone = scenarios.decoded(make(0), pruned(make(0)))
    first, second = pruned(model), DynamicCache()
    logits = scenarios.prefill(model, second)
    yield Moment(AFTER, pruned_alone, partial(scenarios.decoded, model, first))
    yield Moment(AFTER, whole_alone, lambda: scenarios.decoded(model, second, logits))


def _one_press_on_two_models(press: Press, make: Make) -> Iterator[Moment]:
    """Each model prunes as if it were alone."""
    opens, models = press(RATIO), (make(0), make(1))
    bare = {model: scenarios.answer(model) for model in models}
    alone = {model: _alone(opens, model) for model in models}
    with opens(models[0]), opens(models[1]):
        yield from _asked(INSIDE, alone)
    yield from _asked(AFTER, bare)


def _alone(opens: Any, model: PreTrainedModel) -> Response:
    """What `model` answers inside of a press, on a copy that nobody sees afterwards."""
    twin = copy.deepcopy(model)
    with contained(twin), opens(twin):
        return scenarios.answer(twin)


def _nested(press: Press, make: Make) -> Iterator[Moment]:
    """Two scopes on one model, the outer closed first."""
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
    "instances of the class": partial(_bystanders, _of_the_class),
    "instances of other classes": partial(_bystanders, _of_other_classes),
    "an instance in another thread": partial(_bystanders, lambda _, make: [make(1)], ask=in_thread),
    "an instance with the same config": partial(_bystanders, _with_its_config),
    "an instance with the same module": partial(_bystanders, _with_its_module),
    "a deep copy made before": partial(_bystanders, lambda model, _: [copy.deepcopy(model)]),
    "a deep copy made inside": partial(_itself, copied=True),
    "two caches, one of them pruned": _pruned_and_whole_cache,
    "one press on two models": _one_press_on_two_models,
    "two scopes, the outer closed first": _nested,
}
"""What a mechanism is opened on, and who looks."""


# ---- reading the table -------------------------------------------------------------------------


class Isolation(scenarios.Scenarios[Options]):
    """See which bystanders a press on one model changes, mechanism by mechanism.

    With a press open on one model, which other models, copies, caches and threads answer
    differently, and which recover?

    A press is opened on a small model in each situation, and bystanders run the same prefill
    and two decode steps before, inside and after. Their logits and caches are compared bit for
    bit, and the worst of all bystanders counts. Mechanisms other than hooks and patches are
    tried in their plainest form; with more code, some could tell whose call they are in.
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
    shows = "What became of bystanders, bit for bit, by situation (rows) and mechanism"
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
        note = "What became of bystanders; blank: they give the same bits inside and after."
        return [self.matrix(tables).table(note)]

    def contrasts(self, tables: Tables) -> list[Contrast]:
        table = tables["isolation"]
        own, others = _untouched(table)
        title = f"Situations that affect nobody else, of {table['situation'].nunique()}"
        chosen = pd.concat([own, others.nsmallest(1)]).astype(float)
        return [Contrast(title, chosen.to_dict())]


def _untouched(table: pd.DataFrame) -> tuple[pd.Series[Any], pd.Series[Any]]:
    """In how many situations nobody was touched, by mechanism: by each of ours, and by others."""
    untouched = (table["outcome"] == UNTOUCHED).groupby(table["mechanism"], sort=False).sum()
    ours = untouched.index.isin(OURS)
    return untouched[ours], untouched[~ours]


EXPERIMENT = Isolation()
