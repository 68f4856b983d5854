"""Hooks leave the same bits as patches, over drawn models, inputs, presses and nestings.

The default run compares well over 1,000 drawn cases; `HYPOTHESIS_PROFILE=short` runs half of
them, `HYPOTHESIS_PROFILE=long` a hundred times as many, with new seeds each time.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

import hooks_impl
from experiments import strategies
from experiments.strategies import HEADS, Case, Heads, ModelSpec
from experiments.testbed.compare import Inputs, PressPair, run
from experiments.testbed.families import (
    FAMILIES,
    HYBRID,
    NO_ROPE,
    supported_implementations,
)
from experiments.testbed.recipes import fitted_pair, recipe_pair
from press_core import Needs
from press_core.replay.rows import ReplayPress

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
N_CASES = {"short": 12, "long": 3000}.get(PROFILE, 28)
PRESSES = sorted(hooks_impl.PRESSES)
QUERY_PRESSES = [name for name in PRESSES if Needs.QUERIES in recipe_pair(name, 0.5).hook.needs]
REPLAYING = [name for name in PRESSES if issubclass(hooks_impl.PRESSES[name], ReplayPress)]


def many(share: float = 1.0) -> settings:
    """Settings for a share of the cases of a press; the same cases in every run but long ones."""
    return settings(
        max_examples=int(N_CASES * share),
        derandomize=PROFILE != "long",
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def assert_same(case: Case) -> None:
    difference = case.difference()
    assert difference is None, str(difference)


# ---- drawn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESSES)
def test_drawn_cases(name):
    @seed(PRESSES.index(name))
    @many()
    @given(strategies.cases(strategies.press_pairs(name)))
    def check(case):
        assert_same(case)

    check()


def test_nested_scopes():
    depths = set()

    @many()
    @given(strategies.cases(strategies.nestable_pairs(), scopes=(1, 3)))
    def check(case):
        assert_same(case)
        depths.add(len(case.presses))

    check()
    assert depths == {1, 2, 3}


# GPT-2 and StableLM have no flex_attention in transformers, and sinks have none on a CPU.
FLEX_FAMILIES = [family for family in FAMILIES if family not in ("gpt2", "stablelm", "gpt_oss")]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention():
    """Not compiled, which takes a C++ compiler and half a minute per shape and adds a kernel."""
    models = strategies.model_specs(
        FLEX_FAMILIES,
        heads=[heads for heads in HEADS if heads.head_dim >= 16],
        dtypes=[torch.float32, torch.bfloat16],
        implementations=["flex_attention"],
        max_layers=1,
    )

    @many(share=0.1)
    @given(strategies.cases(models=models, max_length=40))
    def check(case):
        assert_same(case)

    with torch.compiler.set_stance("force_eager"):
        check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PRESSES)
def test_drawn_cases_on_a_gpu(name):
    models = strategies.model_specs(device="cuda")

    @seed(PRESSES.index(name))
    @many(share=0.5)
    @given(strategies.cases(strategies.press_pairs(name), models))
    def check(case):
        assert_same(case)

    check()


# ---- corners, all of them ------------------------------------------------------------------------


def spec(family: str, heads: Heads = HEADS[1], implementation: str | None = None) -> ModelSpec:
    implementation = implementation or supported_implementations(family)[0]
    return ModelSpec(family, 1, heads, torch.float32, implementation)


def presses_for(family: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if not (family in NO_ROPE and Needs.ROPE in recipe_pair(name, 0.5).hook.needs)
        and name != "FinchPress"  # whose prompts need a delimiter
    ]


def small(name: str, ratio: float, model: ModelSpec) -> PressPair:
    """A press with windows and sinks that leave something to choose of four tokens."""
    presses = recipe_pair(name, ratio)
    fields = {"window_size": 2, "n_sink": 1, "sink_size_start": 1, "sink_size_end": 1}
    known = {n: v for n, v in fields.items() if n in presses.hook.__dataclass_fields__}
    if name == "ExpectedAttentionStatsPress":  # its statistics were collected without four sinks
        known = {}
    shrunk = PressPair(*(replace(press, **known) for press in presses))
    return fitted_pair(shrunk, model.build())


AS_MANY = [(4,), (4, 4, 4, 4), (4, 3)]


def assert_same_of(model: ModelSpec, name: str, presses: PressPair, lengths: list[Any]) -> None:
    for each in lengths:
        if name in REPLAYING and model.family in HYBRID and len(set(each)) > 1:
            continue  # both refuse padded batches there
        assert_same(Case(model, (presses,), Inputs.random(strategies.VOCABULARY, each)))


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_tokens_as_heads(family):
    """The shape of the collected query does not tell heads from tokens then."""
    for heads in (Heads(4, 4, 16), Heads(4, 2, 16), Heads(4, 1, 16)):
        for implementation in set(supported_implementations(family)) & {"eager", "sdpa"}:
            model = spec(family, heads, implementation)
            names = ["SnapKVPress"] if heads.num_kv_heads != 2 else QUERY_PRESSES
            for name in presses_for(family, names):
                lengths = AS_MANY if name == "SnapKVPress" else AS_MANY[2:]
                assert_same_of(model, name, small(name, 0.5, model), lengths)


# Plain, rotated in part, without rotation, with sliding layers, with sinks.
KINDS = ("llama", "gpt_neox", "gpt2", "gemma3_text", "gpt_oss")


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("lengths", [(1,), (5, 1)], ids=str)
def test_a_single_token_stays(family, lengths):
    model = spec(family)
    for name in presses_for(family, PRESSES):
        presses = fitted_pair(recipe_pair(name, 0.9), model.build())
        assert_same_of(model, name, presses, [lengths])
        if max(lengths) == 1:
            inputs = Inputs.random(strategies.VOCABULARY, lengths)
            for layer in run(model.build(), presses.hook, inputs).pruned:
                assert layer.keys.shape[2] == 1
