"""Hooks leave the same bits as patches, over drawn models, inputs, presses and nestings.

The default run compares well over 1,000 drawn cases; `HYPOTHESIS_PROFILE=short` runs half of
them, `HYPOTHESIS_PROFILE=long` a hundred times as many, with new seeds each time. Each test says
how many cases it ran (and writes it into a JUnit report as the property `cases`).
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st

import hooks_impl
from experiments import strategies
from experiments.strategies import HEADS, Case, Heads, ModelSpec
from experiments.testbed.compare import Inputs, PressPair, compare, pair, run
from experiments.testbed.families import (
    FAMILIES,
    HYBRID,
    NO_GQA,
    NO_ROPE,
    supported_implementations,
)
from experiments.testbed.recipes import DELIMITER, fitted_pair, recipe_pair
from press_core import Needs, Press, UnsupportedModelError
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


@pytest.fixture
def report(request, record_property, capsys):
    """Call with the number of cases that a test ran: says it, aloud and in the JUnit report."""

    def say(n_cases: int) -> None:
        record_property("cases", n_cases)
        with capsys.disabled():
            print(f"\n{request.node.name}: {n_cases} cases, 0 mismatches", end=" ")

    return say


def assert_same(case: Case) -> None:
    difference = case.difference()
    assert difference is None, str(difference)


# ---- drawn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESSES)
def test_drawn_cases(name, report):
    seen: Counter[str] = Counter()

    @seed(PRESSES.index(name))
    @many()
    @given(strategies.cases(strategies.press_pairs(name)))
    def check(case):
        assert_same(case)
        seen.update(["cases", *features(case)])

    check()
    assert seen["cases"] >= N_CASES
    if N_CASES >= 300:  # fewer need not meet every corner, which have tests of their own below
        missed = {str(wanted) for wanted in WANTED if not seen[wanted]}
        assert not missed, f"not a single case of {missed}"
    report(seen["cases"])


DTYPES = [str(dtype) for dtype in strategies.DTYPES]
GROUPS = ["1 per KV head", "2 per KV head", "4 per KV head"]
LAYOUTS = ["padded", "batch", "one token", "as many tokens as heads", "question", "decode step"]
WANTED = ["hybrid", "eager", "sdpa", "ratio 0", *DTYPES, *GROUPS, *LAYOUTS]


def features(case: Case) -> list[str]:
    """What of `WANTED` a case has."""
    model, inputs = case.model, case.inputs
    batch, length = inputs.context.shape
    heads = model.heads
    group = 1 if model.family in NO_GQA else heads.num_heads // heads.num_kv_heads
    has = {
        "hybrid": model.family in HYBRID,
        "ratio 0": getattr(case.presses[0].hook, "compression_ratio", 0) == 0,
        "padded": inputs.attention_mask is not None,
        "batch": batch > 1,
        "one token": length == 1,
        "as many tokens as heads": length == heads.num_heads,
        "question": any(ids.shape[1] > 1 for ids in inputs.following),
        "decode step": any(ids.shape[1] == 1 for ids in inputs.following),
    }
    named = [name for name, holds in has.items() if holds]
    return [*named, model.attn_implementation, str(model.dtype), f"{group} per KV head"]


def test_nested_scopes(report):
    depths: Counter[int] = Counter()

    @many()
    @given(strategies.cases(strategies.nestable_pairs(), scopes=(1, 3)))
    def check(case):
        assert_same(case)
        depths[len(case.presses)] += 1

    check()
    assert depths.keys() == {1, 2, 3}
    assert depths.total() >= N_CASES
    report(depths.total())


# GPT-2 and StableLM have no flex_attention in transformers, and sinks have none on a CPU.
FLEX_FAMILIES = [family for family in FAMILIES if family not in ("gpt2", "stablelm", "gpt_oss")]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(report):
    """Not compiled, which takes a C++ compiler and half a minute per shape and adds a kernel."""
    n_cases = 0
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
        nonlocal n_cases
        assert_same(case)
        n_cases += 1

    with torch.compiler.set_stance("force_eager"):
        check()
    report(n_cases)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PRESSES)
def test_drawn_cases_on_a_gpu(name, report):
    n_cases = 0
    models = strategies.model_specs(device="cuda")

    @seed(PRESSES.index(name))
    @many(share=0.5)
    @given(strategies.cases(strategies.press_pairs(name), models))
    def check(case):
        nonlocal n_cases
        assert_same(case)
        n_cases += 1

    check()
    report(n_cases)


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


@pytest.mark.parametrize("family", sorted(NO_ROPE))
def test_both_refuse_a_model_without_rope(family):
    presses = pair("ExpectedAttentionPress", compression_ratio=0.5)
    inputs = Inputs.random(strategies.VOCABULARY, (20,))
    with pytest.raises(UnsupportedModelError, match="rotary"):
        compare(spec(family).build(), presses.hook, presses.patch, inputs)


# ---- a row of a padded batch is that row alone ---------------------------------------------------

# Their softmax under eager attention, or their experts, compute in float32 at most.
ONLY_FLOAT32 = ("gemma2", "mixtral", "gpt_oss")


@st.composite
def padded_cases(draw, models):
    """A padded batch, and a press that finds no ties in it but those it makes itself."""
    spec = draw(models)
    inputs = draw(strategies.inputs(padded=True, distinct=True, also=(3,)))
    assume(2 not in row_lengths(inputs))  # the mean of two unit keys is as far from both
    pairs = strategies.press_pairs().filter(lambda p: strategies.fits(p, spec) and not ties(p.hook))
    presses = draw(pairs)
    if isinstance(presses.hook, hooks_impl.FinchPress):
        inputs = inputs.with_delimiter(DELIMITER, draw(st.integers(1, 12)))
    if isinstance(presses.hook, ReplayPress):
        assume(spec.family not in HYBRID)  # where it refuses padded batches
    return Case(spec, (fitted_pair(presses, spec.build()),), inputs)


def ties(press: Press) -> bool:
    """Whether another press has to choose among tokens to which `press` gives equal scores."""
    scores_equally = (hooks_impl.StreamingLLMPress, hooks_impl.LagKVPress)
    return any(isinstance(part, scores_equally) or ties(part) for part in press.parts)


def row_lengths(inputs: Inputs) -> list[int]:
    assert inputs.attention_mask is not None
    return inputs.attention_mask.sum(dim=-1).tolist()


def kept(layer, row, padding):
    """Positions that each head keeps of a row, counted from the row's first token."""
    if layer.positions is not None:
        return [[p - padding for p in head if p >= 0] for head in layer.positions[row].tolist()]
    return [list(range(layer.keys.shape[2] - padding))] * layer.keys.shape[1]


def assert_rows_as_alone(case: Case, mechanism: str, tolerance: float) -> None:
    model, press = case.model.build(), getattr(case.presses[0], mechanism)
    together = run(model, press, case.inputs)
    for row, length in enumerate(row_lengths(case.inputs)):
        padding = case.inputs.context.shape[1] - length
        alone = run(model, press, case.inputs.row(row))
        for layer, layer_alone in zip(together.pruned, alone.pruned, strict=True):
            if "Sliding" not in layer.kind:  # those are not pruned
                assert kept(layer, row, padding) == kept(layer_alone, 0, 0)
        for index, logits in enumerate(alone.logits):
            in_batch = together.logits[index][row, padding if index == 0 else 0 :]
            torch.testing.assert_close(in_batch, logits[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("mechanism", ["hook", "patch"])
def test_rows_of_a_padded_batch_are_as_alone(mechanism, report):
    families = [family for family in FAMILIES if family not in ONLY_FLOAT32]
    models = strategies.model_specs(families, dtypes=[torch.float64], implementations=["sdpa"])
    n_cases = 0

    @many(share=0.5)
    @given(padded_cases(models))
    def check(case):
        nonlocal n_cases
        assert_rows_as_alone(case, mechanism, tolerance=1e-10)
        n_cases += 1

    check()
    report(n_cases)


@pytest.mark.parametrize("family", ONLY_FLOAT32)
def test_rows_of_a_padded_batch_are_as_alone_in_float32(family):
    """Each press with one mechanism: both leave the same bits."""
    turns = itertools.cycle(("hook", "patch"))
    inputs = Inputs.random(strategies.VOCABULARY, (48, 31, 9), distinct=True)
    for name in presses_for(family, PRESSES):
        if name in REPLAYING and family in HYBRID:
            continue  # which refuses padded batches there
        presses, mechanism = fitted_pair(recipe_pair(name, 0.5), spec(family).build()), next(turns)
        assert_rows_as_alone(Case(spec(family), (presses,), inputs), mechanism, tolerance=1e-4)
