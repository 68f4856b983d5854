"""Every mechanism prunes as the presses do, and comes off again."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

import hooks_impl
from experiments import UserError
from experiments.audit import differences, snapshot
from experiments.mechanisms import MECHANISMS, contained
from tests.support import build, token_ids

RATIO, CONTEXT, STEPS = 0.5, 30, 3
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)
IN_PLACE = ("attention interface", "registry patch")
"""Have tensors alone, and cannot tell the cache how many tokens it has seen."""


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
@pytest.mark.parametrize(("family", "batch"), [("llama", 2), ("qwen3", 1)])
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
    assert same(own[0], prefilled)
    assert own[3] == (CONTEXT // 2 if name in IN_PLACE else CONTEXT) + STEPS


def test_what_is_contained():
    model = build("llama")
    before = snapshot(model)
    with contained(model):
        LlamaAttention.note = 1
        LlamaAttention.forward = nn.Linear.forward
        AttentionInterface.register("planted", run)
        assert len(differences(before, snapshot(model))) == 3
    assert differences(before, snapshot(model)) == ()


def test_eager_attention_is_not_in_the_registry():
    model = build("llama", attn_implementation="eager")
    opens = MECHANISMS["attention interface"](RATIO)
    with pytest.raises(UserError, match="load with sdpa"), opens(model):
        pytest.fail("entered")
