"""Presses at their usual settings: all of them, about as much evicted as was asked for."""

import pytest
import torch

import hooks_impl
from experiments import UserError
from experiments.framework.plots import press_label
from experiments.testbed.compare import Inputs
from experiments.testbed.recipes import DELIMITER, PROMPTS, press_name, recipe_pair, suited_pair
from press_core import kept_lengths
from press_core.learned.calibration import Calibration
from tests.experiments.tiny import CASES
from tests.support import build, ran

MODEL = "facts-llama"
LENGTH = 512
TOLD_A_SHARE = sorted(set(hooks_impl.PRESSES) - {"ThinKPress", "SimLayerKVPress"})
everyone = pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))


@everyone
def test_both_mechanisms_have_the_same_settings(name):
    hook, patch = recipe_pair(name, 0.5, LENGTH)
    assert (type(hook).__name__, type(patch).__name__) == (name, name)
    assert (hook.mechanism, patch.mechanism) == ("hooks", "patches")
    assert repr(hook) == repr(patch)


@pytest.mark.parametrize("name", TOLD_A_SHARE)
def test_about_as_much_is_evicted_as_was_asked_for(name, model):
    """After the prefill or, by presses that act then, after one decode step."""
    press = suited_pair(name, 0.75, LENGTH, model).hook
    inputs = Inputs.random(model.config.vocab_size, (LENGTH,), question=0, steps=1)
    if name == "FinchPress":
        inputs = inputs.with_delimiter(DELIMITER, question=6)
    cache, _ = ran(model, press, (inputs.context, *inputs.following))
    evicted = 1 - torch.cat(kept_lengths(cache)).double().mean() / (LENGTH + 1)
    low = 0.63 if name == "DMSPress" else 0.69  # it spares a window
    assert low < evicted < 0.8


def test_defaults_stay_where_contexts_are_long_enough_and_results_repeat():
    snap = hooks_impl.SnapKVPress(0.5)
    assert recipe_pair("SnapKVPress", 0.5, LENGTH).hook == snap
    assert recipe_pair("AdaKVPress", 0.5, LENGTH).hook == hooks_impl.AdaKVPress(snap)
    assert recipe_pair("SnapKVPress", 0.9, LENGTH).patch.window_size == 25  # half of 51
    assert recipe_pair("RandomPress", 0.5, LENGTH).hook.seed is not None


@pytest.mark.parametrize(("name", "field"), CASES["learned"].items())
def test_what_was_learned_is_found_or_made_up(name, field, model):
    for press in suited_pair(name, 0.5, LENGTH, model):
        assert getattr(press, field) is None, "it lies beside the model"
    for press in suited_pair(name, 0.5, LENGTH, build("llama")):
        assert isinstance(getattr(press, field), Calibration)


def test_prompts_are_those_of_the_tokenizer_or_made_up(model):
    assert suited_pair("KVzipPress", 0.5, LENGTH, model).hook.prompts is None
    assert suited_pair("KVzipPress", 0.5, LENGTH, build("llama")).patch.prompts is PROMPTS


def test_presses_are_named_with_and_without_press_and_in_any_case():
    for given in ("SnapKVPress", "SnapKV", "snapkv", "SNAPKVPRESS"):
        assert press_name(given) == "SnapKVPress"
    with pytest.raises(UserError, match=r"no press 'Snap'.* AdaKV, .*ThinK"):
        press_name("Snap")
    assert press_label("mine:MyHookPress,mine:MyPatchPress") == "MyHook/MyPatch"  # one word
