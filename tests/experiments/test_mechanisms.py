"""Every mechanism prunes as the presses do, and comes off again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

import hooks_impl
from experiments import UserError
from experiments.audit import differences, snapshot
from experiments.mechanisms import MECHANISMS
from experiments.mechanisms.contain import contained
from press_core import PressError
from tests.support import build, token_ids

RATIO, CONTEXT, STEPS = 0.5, 30, 3
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)
LATE = ("function patch",)
"""Evicts as the layer is called again, and not before."""
IN_PLACE = ("attention interface", "function mode", "registry patch")
"""Have tensors alone, and cannot tell the cache how many tokens it has seen."""


@pytest.fixture
def model():
    model = build("llama", num_layers=3)
    with contained(model):
        yield model


@torch.no_grad()
def run(model, batch=1):
    """States of each layer after the prefill and at the end, logits, and tokens seen."""
    ids, cache = token_ids(batch, CONTEXT + STEPS), DynamicCache()
    logits = [model(ids[:, :CONTEXT], past_key_values=cache).logits]
    prefilled = [states.clone() for layer in cache.layers for states in (layer.keys, layer.values)]
    for i in range(CONTEXT, CONTEXT + STEPS):
        positions = torch.full((batch, 1), i)
        step = model(ids[:, i : i + 1], position_ids=positions, past_key_values=cache)
        logits.append(step.logits)
    final = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    return prefilled, final, logits, cache.get_seq_length()


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@every_mechanism
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_mechanism_leaves_the_bits_that_the_press_leaves(name, family, batch):
    model = build(family)
    whole = run(model, batch)
    with hooks_impl.KnormPress(RATIO)(model):
        prefilled, final, logits, _ = run(model, batch)
    assert prefilled[0].shape[2] == CONTEXT // 2
    assert not same(logits[1:], whole[2][1:])
    with contained(model), MECHANISMS[name](RATIO)(model):
        own = run(model, batch)
    assert same(own[1], final)
    assert same(own[2], logits)
    assert same(own[0], whole[0] if name in LATE else prefilled)
    assert own[3] == (CONTEXT // 2 if name in IN_PLACE else CONTEXT) + STEPS


@every_mechanism
def test_a_mechanism_touches_something_and_comes_off_again(name, model):
    model._can_set_attn_implementation()  # the library notes the answer on the class
    before, bare = snapshot(model), run(model)
    with MECHANISMS[name](RATIO)(model):
        assert differences(before, snapshot(model))
        assert not same(run(model)[1], bare[1])
    if name == "permanent class patch":
        return
    after = run(model)
    assert same(after[0] + after[1] + after[2], bare[0] + bare[1] + bare[2])
    if name != "plain instance patch":
        assert differences(before, snapshot(model)) == ()


def test_what_the_plain_patch_leaves(model):
    """The method it found is put back as an attribute, where there was none: it hides the class's.

    A class that is patched later does not reach this model any more.
    """
    with MECHANISMS["plain instance patch"](RATIO)(model):
        pass
    assert "forward" in vars(model.model.layers[0].self_attn)
    whole = run(model)
    with MECHANISMS["class patch"](RATIO)(model):
        assert same(run(model)[1], whole[1])
        assert run(build("llama", num_layers=3))[0][0].shape[2] == CONTEXT // 2


def test_the_permanent_patch_stays_until_it_is_put_back_from_outside():
    model, forward = build("llama"), LlamaAttention.forward
    with contained(model):
        with MECHANISMS["permanent class patch"](RATIO)(model):
            pass
        assert LlamaAttention.forward is not forward
        assert run(model)[0][0].shape[2] == CONTEXT // 2
    assert LlamaAttention.forward is forward
    assert run(model)[0][0].shape[2] == CONTEXT


def test_what_is_contained():
    model = build("llama")
    before = snapshot(model)
    with contained(model):
        LlamaAttention.note = 1
        LlamaAttention.forward = nn.Linear.forward
        AttentionInterface.register("planted", run)
        torch.overrides.TorchFunctionMode().__enter__()
        assert len(differences(before, snapshot(model))) == 4
    assert differences(before, snapshot(model)) == ()


def test_eager_attention_is_not_in_the_registry():
    model = build("llama", attn_implementation="eager")
    with (
        pytest.raises(UserError, match="load with sdpa"),
        MECHANISMS["attention interface"](RATIO)(model),
    ):
        pytest.fail("entered")


def test_a_question_of_several_tokens_is_too_late_for_the_function_patch(model):
    """The mask was made for the whole cache before the layer evicts."""
    cache = DynamicCache()
    with torch.no_grad(), MECHANISMS["function patch"](RATIO)(model):
        model(token_ids(1, CONTEXT), past_key_values=cache)
        with pytest.raises((RuntimeError, PressError)):
            model(token_ids(1, 5), past_key_values=cache)


def test_the_function_patch_needs_a_module_that_calls():
    from transformers.models.llama import modeling_llama

    model, states = build("llama"), torch.zeros(1, 1, 2, 4)
    with (
        MECHANISMS["function patch"](RATIO)(model),
        pytest.raises(LookupError, match="not called by a module"),
    ):
        modeling_llama.apply_rotary_pos_emb(states, states, states[0], states[0])
