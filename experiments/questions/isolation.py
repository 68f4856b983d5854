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
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
import patch_impl
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Contrast, Finding, Tables
from experiments.framework.tables import ResultTable
from experiments.mechanisms import MECHANISMS, OURS
from experiments.mechanisms.contain import contained
from experiments.mechanisms.scenarios import Family, Moment, Scenarios, Wrong, some_of, wrongs
from experiments.testbed.families import build
from experiments.testbed.response import Response, random_tokens, states_of
from press_core import PressError, attention_sites

RATIO, OTHER_RATIO = 0.5, 0.25
CONTEXT, STEPS = 24, 2
_LENGTH = CONTEXT + 4 * STEPS  # of more steps than any situation takes
N_INSTANCES = 3
INSIDE, AFTER = "inside", "after"

UNTOUCHED, RECOVERS, FOR_GOOD, ERROR = OUTCOMES = (
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

    mechanism: Annotated[tuple[str, ...], some_of(MECHANISMS)] = ()
    family: Family = "llama"


# ---- answers -----------------------------------------------------------------------------------


@torch.no_grad()
def prefill(model: PreTrainedModel, cache: DynamicCache) -> list[Tensor]:
    logits: Tensor = model(random_tokens(_LENGTH)[:, :CONTEXT], past_key_values=cache).logits
    return [logits]


@torch.no_grad()
def decode(model: PreTrainedModel, cache: DynamicCache, start: int = CONTEXT) -> list[Tensor]:
    """`STEPS` single tokens, as `generate` would pass them."""
    logits = []
    for i in range(start, start + STEPS):
        ids, position = random_tokens(_LENGTH)[:, i : i + 1], torch.tensor([[i]])
        logits.append(model(ids, position_ids=position, past_key_values=cache).logits)
    return logits


def left(logits: list[Tensor], cache: DynamicCache) -> Response:
    """What forwards and their cache amount to."""
    seen = [int(layer.get_seq_length()) for layer in cache.layers]
    return Response(logits, states_of(cache), seen)


def decoded(model: PreTrainedModel, cache: DynamicCache, start: int = CONTEXT) -> Response:
    return left(decode(model, cache, start), cache)


def answer(model: PreTrainedModel) -> Response:
    """A prefill and two steps on a new cache."""
    cache = DynamicCache()
    return left(prefill(model, cache) + decode(model, cache), cache)


def in_thread(model: PreTrainedModel) -> Response:
    """What the model answers in a thread that knows nothing of any scope."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(answer, model).result()


# ---- situations --------------------------------------------------------------------------------


Press = Callable[[float], Any]
"""From a compression ratio to what is opened on a model."""

Make = Callable[[int], PreTrainedModel]
"""From a seed to a small model; all are of one family."""

Answers = Callable[[PreTrainedModel], Response]


def _asked(
    when: str, rights: list[Response], models: list[PreTrainedModel], ask: Answers = answer
) -> Iterator[Moment]:
    for right, model in zip(rights, models, strict=True):
        yield Moment(when, right, partial(ask, model))


def _bystanders(
    others: Callable[[PreTrainedModel, Make], list[PreTrainedModel]],
    press: Press,
    make: Make,
    ask: Answers = answer,
) -> Iterator[Moment]:
    """Other models than the one that the press is open on."""
    model = make(0)
    bystanders = others(model, make)
    rights = [answer(bystander) for bystander in bystanders]
    with press(RATIO)(model):
        answer(model)
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


def _with_its_weights(model: PreTrainedModel, make: Make) -> list[PreTrainedModel]:
    other = make(1)
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        theirs._parameters.update(mine._parameters)
    return [other]


def _with_its_module(model: PreTrainedModel, make: Make) -> list[PreTrainedModel]:
    other, name = make(1), attention_sites(model)[0].name
    layer, _, attention = name.rpartition(".")
    setattr(other.get_submodule(layer), attention, model.get_submodule(name))
    return [other]


def _copied_inside(press: Press, make: Make) -> Iterator[Moment]:
    model = make(0)
    right = answer(model)
    with press(RATIO)(model):
        answer(model)
        twin = copy.deepcopy(model)
        yield Moment(INSIDE, right, partial(answer, twin))
    yield Moment(AFTER, right, partial(answer, twin))


def _afterwards(
    whom: Callable[[PreTrainedModel], PreTrainedModel], press: Press, make: Make
) -> Iterator[Moment]:
    model = make(0)
    right = answer(model)
    with press(RATIO)(model):
        answer(model)
    yield Moment(AFTER, right, partial(answer, whom(model)))


def _the_model_in_a_thread(press: Press, make: Make) -> Iterator[Moment]:
    model = make(0)
    bare = answer(model)
    with press(RATIO)(model):
        yield Moment(INSIDE, answer(model), partial(in_thread, model))
    yield Moment(AFTER, bare, partial(in_thread, model))


def _cache_filled_before(press: Press, make: Make) -> Iterator[Moment]:
    """A whole cache that is decoded inside, and further after."""
    model, cache, alike, further = make(0), DynamicCache(), DynamicCache(), CONTEXT + STEPS
    prefill(model, cache)
    prefill(model, alike)
    rights = decoded(model, alike), decoded(model, alike, further)
    with press(RATIO)(model):
        yield Moment(INSIDE, rights[0], partial(decoded, model, cache))
    yield Moment(AFTER, rights[1], partial(decoded, model, cache, further))


def _pruned_and_whole_cache(press: Press, make: Make) -> Iterator[Moment]:
    """A cache pruned inside and one filled after, decoded in turn once the scope is closed."""

    def pruned(model: PreTrainedModel) -> DynamicCache:
        cache = DynamicCache()
        with press(RATIO)(model):
            prefill(model, cache)
        return cache

    model = make(0)
    whole_alone = answer(model)
    with contained(model):
        pruned_alone = decoded(make(0), pruned(make(0)))
    first, second = pruned(model), DynamicCache()
    logits = prefill(model, second)
    yield Moment(AFTER, pruned_alone, partial(decoded, model, first))
    yield Moment(AFTER, whole_alone, lambda: left(logits + decode(model, second), second))


def _one_press_on_two_models(press: Press, make: Make) -> Iterator[Moment]:
    """Each model prunes as if it were alone."""
    opens, models = press(RATIO), [make(0), make(1)]
    bare, alone = [answer(model) for model in models], [_alone(opens, model) for model in models]
    with opens(models[0]), opens(models[1]):
        yield from _asked(INSIDE, alone, models)
    yield from _asked(AFTER, bare, models)


def _alone(opens: Any, model: PreTrainedModel) -> Response:
    """What `model` answers inside of a press, on a copy that nobody sees afterwards."""
    twin = copy.deepcopy(model)
    with contained(twin), opens(twin):
        return answer(twin)


def _nested(press: Press, make: Make, other: Press | None = None) -> Iterator[Moment]:
    """Two scopes on one model, the outer closed first, whichever of the two it is."""
    mine, theirs = press(RATIO), (other or press)(OTHER_RATIO)
    yield from _closed_first(mine, theirs, make(0))
    yield from _closed_first(theirs, mine, make(0))


def _closed_first(opens_outer: Any, opens_inner: Any, model: PreTrainedModel) -> Iterator[Moment]:
    bare, inner_alone = answer(model), _alone(opens_inner, model)

    def closed(scope: Any) -> Response:
        scope.__exit__(None, None, None)
        return answer(model)

    with contained(model):
        outer, inner = opens_outer(model), opens_inner(model)
        outer.__enter__()
        try:
            inner.__enter__()
        except PressError:  # to open on what the outer has made of the model
            outer.__exit__(None, None, None)
            raise
        yield Moment(INSIDE, inner_alone, partial(closed, outer))
        yield Moment(AFTER, bare, partial(closed, inner))


SITUATIONS: dict[str, Callable[[Press, Make], Iterator[Moment]]] = {
    "the model, after": partial(_afterwards, lambda model: model),
    "the model, in another thread": _the_model_in_a_thread,
    "instances of the class": partial(_bystanders, _of_the_class),
    "instances of other classes": partial(_bystanders, _of_other_classes),
    "an instance in another thread": partial(_bystanders, lambda _, make: [make(1)], ask=in_thread),
    "an instance with the same config": partial(_bystanders, _with_its_config),
    "an instance with the same weights": partial(_bystanders, _with_its_weights),
    "an instance with the same module": partial(_bystanders, _with_its_module),
    "a deep copy made before": partial(_bystanders, lambda model, _: [copy.deepcopy(model)]),
    "a deep copy made inside": _copied_inside,
    "a deep copy made after": partial(_afterwards, copy.deepcopy),
    "a cache filled before": _cache_filled_before,
    "two caches, one of them pruned": _pruned_and_whole_cache,
    "one press on two models": _one_press_on_two_models,
    "two scopes, the outer closed first": _nested,
    "with hooks, the outer closed first": partial(_nested, other=hooks_impl.KnormPress),
    "with patches, the outer closed first": partial(_nested, other=patch_impl.KnormPress),
}
"""What a mechanism is opened on, and who looks."""


# ---- the matrix --------------------------------------------------------------------------------


def outcome(found: list[Wrong]) -> tuple[str, str]:
    """What became of the bystander that fared worst, and in what it showed."""
    named = [
        (ERROR if wrong.is_error else FOR_GOOD if wrong.when == AFTER else RECOVERS, wrong.detail)
        for wrong in found
    ]
    return max(named, key=lambda pair: OUTCOMES.index(pair[0]), default=(UNTOUCHED, ""))


def try_out(mechanism: str, situation: str, family: str = "llama") -> dict[str, str]:
    """One cell of the matrix, as a row."""

    def make(seed: int) -> PreTrainedModel:
        return build(family, seed=seed)

    found, detail = outcome(wrongs(SITUATIONS[situation](MECHANISMS[mechanism], make), make(0)))
    named = {"mechanism": mechanism, "situation": situation}
    return {**named, "outcome": found, "detail": detail}


# ---- reading the table -------------------------------------------------------------------------


class Isolation(Scenarios[Options]):
    """See which bystanders a press on one model changes, mechanism by mechanism."""

    name = "isolation"
    title = "Who else is affected"
    question = (
        "With a press open on one model, which other models, copies, caches and threads answer "
        "differently, and which recover?"
    )
    method = (
        "A press is opened on a small model in each situation, and bystanders run the same "
        "prefill and two decode steps before, inside and after. Their logits and caches are "
        "compared bit for bit, and the worst of all bystanders counts. Mechanisms other than "
        "hooks and patches are tried in their plainest form; with more code, some could tell "
        "whose call they are in."
    )
    evidence = Evidence.BITS
    full = quick = Options()
    claims: ClassVar = {"bystanders": Claim(quick)}
    case = "situation"
    try_out = staticmethod(try_out)
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

    def findings(self, tables: Tables) -> list[Finding]:
        table = tables["isolation"]
        total, untouched = table["situation"].nunique(), _untouched(table)
        own = untouched[untouched.index.isin(OURS)]
        others = untouched.drop(own.index)
        if own.empty:
            text = f"Bystanders give the same bits in at least **{others.min()}** of {total} "
            return [Finding("bystanders", text + "situations.")]
        text = (
            f"With {' and '.join(own.index)}, bystanders give the same bits in **{own.min()}** "
            f"of {total} situations"
        )
        if not others.empty:
            text += f"; with other mechanisms in {others.min()} to {others.max()}"
        stays = table["mechanism"].isin(OURS) & table["outcome"].isin([FOR_GOOD, ERROR])
        need = "leave other models, copies and caches alone"
        return [Finding("bystanders", f"{text}.", need, "breaks" if stays.any() else "works")]

    def views(self, tables: Tables) -> list[ResultTable]:
        counted = ", ".join(f"{name} {n}" for name, n in _untouched(tables["isolation"]).items())
        total = tables["isolation"]["situation"].nunique()
        note = (
            f"What became of bystanders. Of {total} situations, they give the same bits inside and "
            f"after in: {counted}."
        )
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
