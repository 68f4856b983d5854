"""Who else feels it when a press is opened on one model.

Every mechanism (`experiments.mechanisms`) is opened on a model in every situation below, and
bystanders are asked the same question before, inside and after: a prefill and two decode steps,
with the cache that these leave. Answers are compared bit for bit. Weights and tokens are drawn from
fixed seeds, models are built anew for every cell, and what a mechanism leaves behind in the process
is put back from outside before the next.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from threading import Thread
from typing import Annotated, Any, ClassVar, NamedTuple

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
import patch_impl
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Contrast, Experiment, Finding, Tables
from experiments.framework.heatmap import OutcomeMatrix
from experiments.framework.options import one_of
from experiments.framework.own_model import SMALL, LeftOutError, OwnModel, Planned
from experiments.framework.tables import ResultTable
from experiments.framework.wording import in_one_line
from experiments.mechanisms import MECHANISMS, OURS, Mechanism
from experiments.mechanisms.contain import contained
from experiments.testbed.families import FAMILIES, build
from experiments.testbed.response import Response, random_tokens, states_of
from press_core import PressError, attention_sites

RATIO, OTHER_RATIO = 0.5, 0.25
CONTEXT, STEPS = 24, 2
N_INSTANCES = 3

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

    mechanism: Annotated[
        tuple[str, ...],
        typer.Option(
            help=f"Repeatable; one of: {', '.join(MECHANISMS)}.",
            show_default="all",
            callback=one_of(MECHANISMS),
        ),
    ] = ()
    family: Annotated[
        str, typer.Option(help="Architecture of the models.", callback=one_of(FAMILIES))
    ] = "llama"


# ---- answers -----------------------------------------------------------------------------------


Given = Response | Exception
"""An answer, or what was raised instead."""


class Seen(NamedTuple):
    """One bystander: what it should answer and what it did, inside the scope and after it."""

    expected_inside: Given
    inside: Given
    expected_after: Given
    after: Given


def _tokens() -> Tensor:
    """Of a context and of more steps than any situation takes: `(1, n)`."""
    return random_tokens(CONTEXT + 4 * STEPS)


@torch.no_grad()
def prefill(model: PreTrainedModel, cache: DynamicCache) -> list[Tensor]:
    logits: Tensor = model(_tokens()[:, :CONTEXT], past_key_values=cache).logits
    return [logits]


@torch.no_grad()
def decode(model: PreTrainedModel, cache: DynamicCache, start: int = CONTEXT) -> list[Tensor]:
    """`STEPS` single tokens, as `generate` would pass them."""
    logits = []
    for i in range(start, start + STEPS):
        position = torch.tensor([[i]])
        output = model(_tokens()[:, i : i + 1], position_ids=position, past_key_values=cache)
        logits.append(output.logits)
    return logits


def left(logits: list[Tensor], cache: DynamicCache) -> Response:
    """What forwards and their cache amount to."""
    seen = [int(layer.get_seq_length()) for layer in cache.layers]
    return Response(logits, states_of(cache), seen)


def answer(model: PreTrainedModel) -> Response:
    """A prefill and two steps on a new cache."""
    cache = DynamicCache()
    return left(prefill(model, cache) + decode(model, cache), cache)


def given(ask: Callable[..., Response], *args: Any) -> Given:
    """What `ask` gives, or raises."""
    try:
        return ask(*args)
    except Exception as error:
        return error


def in_thread(ask: Callable[..., Response], *args: Any) -> Given:
    """What `ask` gives in a thread that knows nothing of any scope."""
    results: list[Given] = []
    thread = Thread(target=lambda: results.append(given(ask, *args)))
    thread.start()
    thread.join()
    return results[0]


# ---- situations --------------------------------------------------------------------------------


Make = Callable[[int], PreTrainedModel]
"""From a seed to a small model; all are of one family."""

Situation = Callable[[Mechanism, Make], list[Seen]]
"""Opens a mechanism on a model, and says how the bystanders fared."""


def _watched(
    mechanism: Mechanism,
    model: PreTrainedModel,
    bystanders: list[PreTrainedModel],
    ask: Callable[..., Given] = given,
) -> list[Seen]:
    """The bystanders' answers, with `mechanism` open on `model`, which is run as well."""
    expected = [answer(bystander) for bystander in bystanders]
    with mechanism.press(RATIO)(model):
        answer(model)
        inside = [ask(answer, each) for each in bystanders]
    after = [ask(answer, each) for each in bystanders]
    return [Seen(*four) for four in zip(expected, inside, expected, after, strict=True)]


def instances_of_the_class(mechanism: Mechanism, make: Make) -> list[Seen]:
    return _watched(mechanism, make(0), [make(seed) for seed in range(1, 1 + N_INSTANCES)])


def instances_of_other_classes(mechanism: Mechanism, make: Make) -> list[Seen]:
    model = make(0)
    others = [build(family) for family in ("mistral", "qwen3", "gpt_neox")]
    return _watched(mechanism, model, [o for o in others if type(o) is not type(model)])


def shared_config(mechanism: Mechanism, make: Make) -> list[Seen]:
    model = make(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        other = type(model)(model.config).eval()
    other.load_state_dict(make(1).state_dict())
    return _watched(mechanism, model, [other])


def shared_weights(mechanism: Mechanism, make: Make) -> list[Seen]:
    model, other = make(0), make(1)
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        theirs._parameters.update(mine._parameters)
    return _watched(mechanism, model, [other])


def shared_attention_module(mechanism: Mechanism, make: Make) -> list[Seen]:
    model, other = make(0), make(1)
    name = attention_sites(model)[0].name
    layer, _, attention = name.rpartition(".")
    setattr(other.get_submodule(layer), attention, model.get_submodule(name))
    return _watched(mechanism, model, [other])


def copy_made_before(mechanism: Mechanism, make: Make) -> list[Seen]:
    model = make(0)
    return _watched(mechanism, model, [copy.deepcopy(model)])


def copy_made_inside(mechanism: Mechanism, make: Make) -> list[Seen]:
    model = make(0)
    expected = answer(model)
    with mechanism.press(RATIO)(model):
        answer(model)
        twin = copy.deepcopy(model)
        inside = given(answer, twin)
    return [Seen(expected, inside, expected, given(answer, twin))]


def copy_made_after(mechanism: Mechanism, make: Make) -> list[Seen]:
    model = make(0)
    expected = answer(model)
    with mechanism.press(RATIO)(model):
        answer(model)
    twin = copy.deepcopy(model)
    return [Seen(expected, expected, expected, given(answer, twin))]


def the_model_itself(mechanism: Mechanism, make: Make) -> list[Seen]:
    model = make(0)
    expected = answer(model)
    with mechanism.press(RATIO)(model):
        answer(model)
    return [Seen(expected, expected, expected, given(answer, model))]


def other_instance_in_a_thread(mechanism: Mechanism, make: Make) -> list[Seen]:
    return _watched(mechanism, make(0), [make(1)], in_thread)


def the_model_in_a_thread(mechanism: Mechanism, make: Make) -> list[Seen]:
    model = make(0)
    bare = answer(model)
    with mechanism.press(RATIO)(model):
        pressed = answer(model)
        inside = in_thread(answer, model)
    return [Seen(pressed, inside, bare, in_thread(answer, model))]


def cache_filled_before(mechanism: Mechanism, make: Make) -> list[Seen]:
    """A whole cache that is decoded inside, and further after."""
    model = make(0)
    expected = _decoded_around(model, nullcontext())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* evicted nothing", RuntimeWarning)  # as it should
        got = _decoded_around(model, mechanism.press(RATIO)(model))
    return [Seen(expected[0], got[0], expected[1], got[1])]


def _decoded_around(
    model: PreTrainedModel, scope: AbstractContextManager[Any]
) -> tuple[Given, Given]:
    cache = DynamicCache()
    prefill(model, cache)
    with scope:
        inside = given(lambda: left(decode(model, cache), cache))
    return inside, given(lambda: left(decode(model, cache, CONTEXT + STEPS), cache))


def pruned_and_whole_cache(mechanism: Mechanism, make: Make) -> list[Seen]:
    """A cache pruned inside and one filled after, decoded in turn once the scope is closed."""

    def pruned(model: PreTrainedModel) -> DynamicCache:
        cache = DynamicCache()
        with mechanism.press(RATIO)(model):
            prefill(model, cache)
        return cache

    model = make(0)
    whole_alone = answer(model)
    with contained(model):
        cache = pruned(make(0))
        pruned_alone = left(decode(make(0), cache), cache)
    first, second = pruned(model), DynamicCache()
    logits = prefill(model, second)
    pruned_after = given(lambda: left(decode(model, first), first))
    whole_after = given(lambda: left(logits + decode(model, second), second))
    return [
        Seen(pruned_alone, pruned_alone, pruned_alone, pruned_after),
        Seen(whole_alone, whole_alone, whole_alone, whole_after),
    ]


def one_press_on_two_models(mechanism: Mechanism, make: Make) -> list[Seen]:
    """Each model prunes as if it were alone."""
    press, models = mechanism.press(RATIO), [make(0), make(1)]
    bare = [answer(model) for model in models]
    alone = [_alone(press, model) for model in models]
    with press(models[0]), press(models[1]):
        inside = [given(answer, each) for each in models]
    after = [given(answer, each) for each in models]
    return [Seen(*four) for four in zip(alone, inside, bare, after, strict=True)]


def _alone(press: Any, model: PreTrainedModel) -> Response:
    """What `model` answers inside of the press, on a copy that nobody sees afterwards."""
    twin = copy.deepcopy(model)
    with contained(twin), press(twin):
        return answer(twin)


def nested_with(presses: Callable[[float], Any], mechanism: Mechanism, make: Make) -> list[Seen]:
    """Two scopes on one model, the outer closed first, whichever of the two it is."""
    one, other = mechanism.press(RATIO), presses(OTHER_RATIO)
    return [_closed_first(one, other, make(0)), _closed_first(other, one, make(0))]


def _closed_first(outer_press: Any, inner_press: Any, model: PreTrainedModel) -> Seen:
    bare, inner_alone = answer(model), _alone(inner_press, model)
    with contained(model):
        outer, inner = outer_press(model), inner_press(model)
        outer.__enter__()
        try:
            inner.__enter__()
        except PressError as refusal:  # to open on what the outer has made of the model
            outer.__exit__(None, None, None)
            return Seen(inner_alone, refusal, bare, given(answer, model))

        def ask_without(scope: AbstractContextManager[Any]) -> Given:
            def close_and_ask() -> Response:
                scope.__exit__(None, None, None)
                return answer(model)

            return given(close_and_ask)

        return Seen(inner_alone, ask_without(outer), bare, ask_without(inner))


SITUATIONS: dict[str, Situation] = {
    "the model, after": the_model_itself,
    "the model, in another thread": the_model_in_a_thread,
    "instances of the class": instances_of_the_class,
    "instances of other classes": instances_of_other_classes,
    "an instance in another thread": other_instance_in_a_thread,
    "an instance with the same config": shared_config,
    "an instance with the same weights": shared_weights,
    "an instance with the same module": shared_attention_module,
    "a deep copy made before": copy_made_before,
    "a deep copy made inside": copy_made_inside,
    "a deep copy made after": copy_made_after,
    "a cache filled before": cache_filled_before,
    "two caches, one of them pruned": pruned_and_whole_cache,
    "one press on two models": one_press_on_two_models,
    "two scopes, the outer closed first": lambda mechanism, make: nested_with(
        mechanism.press, mechanism, make
    ),
    "with hooks, the outer closed first": partial(nested_with, hooks_impl.KnormPress),
    "with patches, the outer closed first": partial(nested_with, patch_impl.KnormPress),
}
"""What a mechanism is opened on, and who looks."""


# ---- the matrix --------------------------------------------------------------------------------


def outcome(seen: Seen) -> tuple[str, str]:
    """What became of one bystander, and in what it showed."""
    details = []
    for when, expected, got in (
        ("inside", seen.expected_inside, seen.inside),
        ("after", seen.expected_after, seen.after),
    ):
        if isinstance(expected, Exception):
            raise expected
        if isinstance(got, Exception):
            return ERROR, f"{when}: {in_one_line(got)}"
        details.append(expected.difference(got))
    inside, after = details
    if after:
        return FOR_GOOD, f"after: {after}"
    return (RECOVERS, f"inside: {inside}") if inside else (UNTOUCHED, "")


def try_out(mechanism: Mechanism, situation: str, family: str = "llama") -> dict[str, Any]:
    """One cell of the matrix, as a row: the worst that became of a bystander, and of how many."""

    def make(seed: int) -> PreTrainedModel:
        return build(family, seed=seed)

    with contained(make(0)):
        outcomes = [outcome(seen) for seen in SITUATIONS[situation](mechanism, make)]
    worst = max(outcomes, key=lambda pair: OUTCOMES.index(pair[0]))
    return {
        "mechanism": mechanism.name,
        "situation": situation,
        "outcome": worst[0],
        "bystanders": len(outcomes),
        "touched": sum(name != UNTOUCHED for name, _ in outcomes),
        "detail": worst[1],
    }


# ---- reading the table -------------------------------------------------------------------------


_LOOKS = {
    UNTOUCHED: ("\N{MIDDLE DOT}", "#e3eef4"),
    RECOVERS: ("in", "#f3c969"),
    FOR_GOOD: ("on", "#D55E00"),
    ERROR: ("!", "#444444"),
}


class Isolation(Experiment[Options]):
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
    claims: ClassVar = {
        "bystanders": Claim(quick),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        if own.model_type not in FAMILIES:
            raise LeftOutError(f"it builds no small models of the type {own.model_type}")
        return Planned(Options(mechanism=OURS, family=own.model_type), seconds=3, note=SMALL)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Every situation for every mechanism.

        Returns:
            `isolation`: columns `mechanism`, `situation`, `outcome` (one of `OUTCOMES`),
            `bystanders` and how many of them were `touched`, and a `detail` of the worst.
        """
        mechanisms = [MECHANISMS[name] for name in options.mechanism or MECHANISMS]
        cells = list(product(mechanisms, SITUATIONS))
        rows = [
            try_out(mechanism, situation, options.family)
            for mechanism, situation in progress.track(cells, description=self.name)
        ]
        return {"isolation": pd.DataFrame(rows)}

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
        table = tables["isolation"]
        counted = ", ".join(f"{name} {count}" for name, count in _untouched(table).items())
        note = (
            f"What became of bystanders. Of {table['situation'].nunique()} situations, they give "
            f"the same bits inside and after in: {counted}."
        )
        return [OutcomeMatrix.of(table, "situation", _LOOKS).table(note)]

    def remarks(self, tables: Tables) -> list[str]:
        table = tables["isolation"]
        noted = table[table["outcome"].isin([FOR_GOOD, ERROR])]
        lines = [f"- {row.mechanism}, {row.situation}: {row.detail}" for row in noted.itertuples()]
        return ["Where it did not recover:", "\n".join(lines)] if lines else []

    def figures(self, tables: Tables) -> dict[str, Figure]:
        label = "What became of bystanders, bit for bit, by situation (rows) and mechanism"
        matrix = OutcomeMatrix.of(tables["isolation"], "situation", _LOOKS)
        return {"isolation": matrix.figure(label)}

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
