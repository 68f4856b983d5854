"""Hooks leave the same bits as patches, over drawn models, inputs, presses and nestings.

The default run compares hundreds of drawn cases; `HYPOTHESIS_PROFILE=short` runs half of them,
`HYPOTHESIS_PROFILE=long` hundreds of times as many, with new seeds each time.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

import hooks_impl
from experiments import strategies
from experiments.strategies import HEADS, Case, ModelSpec
from experiments.testbed.compare import Inputs, run
from experiments.testbed.families import FAMILIES, HYBRID, NO_ROPE, supported_implementations
from experiments.testbed.recipes import fitted_pair, recipe_pair
from press_core import Needs
from tests.support import PROFILE, REPLAYING

N_CASES = {"short": 4, "long": 3000}.get(PROFILE, 7)
PRESSES = sorted(hooks_impl.PRESSES)


def assert_same(case):
    difference = case.difference()
    assert difference is None, str(difference)


def compared(cases, n_scopes=1, share=1.0):
    """A test of a share of the cases of a press; the same ones in every run but long ones."""

    @settings(
        max_examples=max(1, int(N_CASES * share)),
        derandomize=PROFILE != "long",
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def check(case):
        assert len(case.presses) == n_scopes
        assert_same(case)

    return check


# ---- drawn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESSES)
def test_drawn_cases(name):
    cases = strategies.cases(strategies.press_pairs(name))
    seed(PRESSES.index(name))(compared(cases))()


@pytest.mark.parametrize("n_scopes", [2, 3])
def test_nested_scopes(n_scopes):
    cases = strategies.cases(strategies.nestable_pairs(), scopes=(n_scopes, n_scopes))
    compared(cases, n_scopes)()


# GPT-2 and StableLM have no flex_attention in transformers, and sinks have none on a CPU.
FLEX_FAMILIES = [family for family in FAMILIES if family not in ("gpt2", "stablelm", "gpt_oss")]


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention():
    models = strategies.model_specs(
        FLEX_FAMILIES,
        heads=[heads for heads in HEADS if heads.head_dim >= 16],
        dtypes=[torch.float32, torch.bfloat16],
        implementations=["flex_attention"],
        max_layers=1,
    )
    compared(strategies.cases(models=models, max_length=40), share=0.2)()


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRESSES)
def test_drawn_cases_on_a_gpu(name):
    cases = strategies.cases(strategies.press_pairs(name), strategies.model_specs(device="cuda"))
    seed(PRESSES.index(name))(compared(cases))()


# ---- corners -------------------------------------------------------------------------------------

# Plain, rotated in part, without rotation, with sliding layers, with sinks.
KINDS = ("llama", "gpt_neox", "gpt2", "gemma3_text", "gpt_oss")


@pytest.mark.parametrize(
    ("family", "lengths"), [*((family, (5, 1)) for family in KINDS), ("llama", (1,))], ids=str
)
def test_a_single_token_stays(family, lengths):
    """Presses take turns where a row has more tokens."""
    in_turn = PRESSES[KINDS.index(family) % 2 :: 2] if max(lengths) > 1 else PRESSES
    model = ModelSpec(family, 1, HEADS[1], torch.float32, supported_implementations(family)[0])
    inputs = Inputs.random(strategies.VOCABULARY, lengths)
    for name in in_turn:
        presses = recipe_pair(name, 0.9)
        if family in NO_ROPE and Needs.ROPE in presses.hook.needs:
            continue
        if name == "FinchPress":  # whose prompts need a delimiter
            continue
        if name in REPLAYING and family in HYBRID and len(lengths) > 1:
            continue  # both refuse padded batches there
        presses = fitted_pair(presses, model.build())
        assert_same(Case(model, (presses,), inputs))
        if max(lengths) == 1:
            for layer in run(model.build(), presses.hook, inputs).pruned:
                assert layer.keys.shape[2] == 1
