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

from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Contrast, Finding, Tables
from experiments.framework.tables import ResultTable
from experiments.mechanisms import MECHANISMS, OURS, scenarios
from experiments.mechanisms.contain import contained
from experiments.testbed.compare import Response
from experiments.testbed.families import build
from press_core import attention_sites

RATIO, OTHER_RATIO = 0.5, 0.25
N_INSTANCES = 3
INSIDE, AFTER = "inside", "after"

UNTOUCHED, RECOVERS, FOR_GOOD, ERROR = (
    "untouched",
    "changed, recovers",
    "changed for good",
    "error",
)
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

Answers = Callable[[PreTrainedModel], Response]


def _asked(
    when: str,
    rights: list[Response],
    models: list[PreTrainedModel],
    ask: Answers = scenarios.answer,
) -> Iterator[scenarios.Moment]:
    for right, model in zip(rights, models, strict=True):
        yield scenarios.Moment(when, right, partial(ask, model))


def _bystanders(
    others: Callable[[PreTrainedModel, Make], list[PreTrainedModel]],
    press: Press,
    make: Make,
    ask: Answers = scenarios.answer,
) -> Iterator[scenarios.Moment]:
    """Other models than the one that the press is open on."""
    model = make(0)
    bystanders = others(model, make)
    rights = [scenarios.answer(bystander) for bystander in bystanders]
    with press(RATIO)(model):
        scenarios.answer(model)
        yield from _asked(INSIDE, rights, bystanders, ask)
    yield from _asked(AFTER, rights, bystanders, ask)


def _of_the_class(model: PreTrainedModel, make: Make) -> list[PreTrainedModel]:
    return [make(seed) for seed in range(1, 1 + N_INSTANCES)]


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


def _copied_inside(press: Press, make: Make) -> Iterator[scenarios.Moment]:
    model = make(0)
    right = scenarios.answer(model)
    with press(RATIO)(model):
        scenarios.answer(model)
        twin = copy.deepcopy(model)
        yield scenarios.Moment(INSIDE, right, partial(scenarios.answer, twin))
    yield scenarios.Moment(AFTER, right, partial(scenarios.answer, twin))


def _afterwards(press: Press, make: Make) -> Iterator[scenarios.Moment]:
    model = make(0)
    right = scenarios.answer(model)
    with press(RATIO)(model):
        scenarios.answer(model)
    yield scenarios.Moment(AFTER, right, partial(scenarios.answer, model))


def _pruned_and_whole_cache(press: Press, make: Make) -> Iterator[scenarios.Moment]:
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
    yield scenarios.Moment(AFTER, pruned_alone, partial(scenarios.decoded, model, first))
    yield scenarios.Moment(AFTER, whole_alone, lambda: scenarios.decoded(model, second, logits))


def _one_press_on_two_models(press: Press, make: Make) -> Iterator[scenarios.Moment]:
    """Each model prunes as if it were alone."""
    opens, models = press(RATIO), [make(0), make(1)]
    bare, alone = (
        [scenarios.answer(model) for model in models],
        [_alone(opens, model) for model in models],
    )
    with opens(models[0]), opens(models[1]):
        yield from _asked(INSIDE, alone, models)
    yield from _asked(AFTER, bare, models)


def _alone(opens: Any, model: PreTrainedModel) -> Response:
    """What `model` answers inside of a press, on a copy that nobody sees afterwards."""
    twin = copy.deepcopy(model)
    with contained(twin), opens(twin):
        return scenarios.answer(twin)


def _nested(press: Press, make: Make) -> Iterator[scenarios.Moment]:
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
        yield scenarios.Moment(INSIDE, inner_alone, partial(closed, outer))
        yield scenarios.Moment(AFTER, bare, partial(closed, inner))


SITUATIONS: dict[str, Callable[[Press, Make], Iterator[scenarios.Moment]]] = {
    "the model, after": _afterwards,
    "instances of the class": partial(_bystanders, _of_the_class),
    "instances of other classes": partial(_bystanders, _of_other_classes),
    "an instance in another thread": partial(_bystanders, lambda _, make: [make(1)], ask=in_thread),
    "an instance with the same config": partial(_bystanders, _with_its_config),
    "an instance with the same module": partial(_bystanders, _with_its_module),
    "a deep copy made before": partial(_bystanders, lambda model, _: [copy.deepcopy(model)]),
    "a deep copy made inside": _copied_inside,
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

    def scenario(self, mechanism: str, situation: str, family: str) -> Iterator[scenarios.Moment]:
        return SITUATIONS[situation](MECHANISMS[mechanism], lambda seed: build(family, seed=seed))

    def named(self, wrong: scenarios.Wrong) -> str:
        return ERROR if wrong.is_error else FOR_GOOD if wrong.when == AFTER else RECOVERS

    def findings(self, tables: Tables) -> list[Finding]:
        table = tables["isolation"]
        total, untouched = table["situation"].nunique(), _untouched(table)
        own = untouched[untouched.index.isin(OURS)]
        others = untouched.drop(own.index)
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
        untouched = _untouched(table)
        others = untouched.drop(list(OURS), errors="ignore").nsmallest(1)
        chosen = [*untouched[untouched.index.isin(OURS)].items(), *others.items()]
        title = f"Situations that affect nobody else, of {table['situation'].nunique()}"
        return [Contrast(title, {str(name): float(count) for name, count in chosen})]


def _untouched(table: pd.DataFrame) -> pd.Series[Any]:
    """By mechanism, in how many situations nobody was touched."""
    return (table["outcome"] == UNTOUCHED).groupby(table["mechanism"], sort=False).sum()


EXPERIMENT = Isolation()
