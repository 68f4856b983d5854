"""Presses that run a context again: what they leave behind, and where they cannot be had."""

import gc
import itertools
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from experiments.testbed.recipes import PROMPTS
from press_core import UnsupportedCacheError, UnsupportedInputError, UnsupportedModelError
from tests.decoders import tiny_decoder
from tests.support import (
    IS_5_2,
    assert_refused,
    both,
    build,
    example_for,
    filled,
    held,
    in_turn,
    left_padded,
    replaying,
    rotating,
    snapshot,
    token_ids,
)

LENGTH = 40
MODES = torch.no_grad, torch.inference_mode, torch.enable_grad


def kvgrad(package):
    return package.KVgradPress(0.5, chunk_size=16, prompts=PROMPTS)


# ---- gradients -----------------------------------------------------------------------------------


def with_graph():
    """Tensors that are part of a graph, wherever they are."""
    gc.collect()
    return {id(x) for x in gc.get_objects() if isinstance(x, Tensor) and x.grad_fn is not None}


@torch.enable_grad()
@both
def test_no_gradient_is_left_behind(package):
    """And the same is kept, whatever the caller does with gradients."""
    model, before = build("llama"), with_graph()
    alive, found, untouched = [], [], snapshot(model)
    for mode, frozen in itertools.product(MODES, (False, True)):
        model.requires_grad_(not frozen)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)  # of a training that goes on
        cache = DynamicCache(config=model.config)
        with mode(), kvgrad(package)(model):
            logits = model(token_ids(2, LENGTH), past_key_values=cache).logits
            logits = model(token_ids(2, 3), past_key_values=cache).logits
        found.append(held(cache))
        if mode is not torch.enable_grad:
            alive.append((cache, logits))
            states = [x for layer in cache.layers for x in (layer.keys, layer.values, logits)]
            assert not any(x.requires_grad for x in states)
        for parameter in model.parameters():
            assert parameter.requires_grad is not frozen
            assert torch.equal(parameter.grad, torch.ones_like(parameter))
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    del cache, logits, states
    assert all(other == found[0] for other in found)
    assert snapshot(model) == untouched
    assert with_graph() <= before, "none of a cache, of logits or of the model"


@torch.enable_grad()
@both
def test_gradients_of_the_caller_are_what_they_were(package):
    """The replay goes back through itself alone."""
    model, ids = build("llama", dtype=torch.float64), token_ids(1, LENGTH)
    weights, gradients = list(model.parameters()), []
    for press in (None, kvgrad(package)):
        with nullcontext() if press is None else press(model):
            logits = model(ids, past_key_values=DynamicCache(config=model.config)).logits
            gradients.append(torch.autograd.grad(logits.logsumexp(-1).sum(), weights))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    assert all(weight.grad is None for weight in weights)


@torch.enable_grad()
@pytest.mark.parametrize("name", ["KVzipPress", "RestoreKVPress", "QFilterPress"])
def test_states_of_sliding_layers_may_have_gradients(package, name):
    model, ids = build("gemma3_text"), token_ids(1, LENGTH)
    press = torch.inference_mode()(example_for)(package, name, 0.5, model)
    with press(model):
        cache = model(ids).past_key_values
    assert held(cache) == held(filled(model, press, ids))


@both
def test_a_model_made_in_inference_mode_is_refused_before_anything_is_installed(package):
    with torch.inference_mode():
        model = build("llama")
    assert_refused(kvgrad(package), model, UnsupportedModelError, r"torch\.inference_mode")


@both
def test_attention_without_a_gradient_is_refused_when_it_is_opened(package):
    """PyTorch has none for flex_attention on a CPU."""
    model = build("llama", attn_implementation="flex_attention")
    with pytest.raises(UnsupportedModelError, match=r"gradient .*flex_attention.*CPU"):
        kvgrad(package).register(model)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


@both
def test_gradient_checkpointing_is_refused_by_name(package):
    """It takes the cache away from a training model."""
    model = build("llama").train()
    model.gradient_checkpointing_enable()
    match = r"checkpointing.*model\.eval\(\)"
    assert_refused(kvgrad(package), model, UnsupportedModelError, match)


@in_turn("name", ["KVComposePress", "KVzipPress", "RestoreKVPress"])
def test_a_cache_that_gradient_checkpointing_leaves_empty_is_not_replayed(package, name):
    model, cache = build("llama").train(), DynamicCache()
    with example_for(package, name, 0.5, model)(model), torch.enable_grad():
        model.gradient_checkpointing_enable()
        model(token_ids(1, LENGTH), past_key_values=cache)
    assert cache.get_seq_length() == 0


@both
def test_gradients_beyond_the_range_of_the_dtype_are_told(package):
    model = build("llama", dtype=torch.float16)
    with kvgrad(package)(model):
        model.model.norm.weight.fill_(1)
        model.model.layers[-1].mlp.down_proj.weight.mul_(6e4)
        with pytest.raises(UnsupportedInputError, match=r"float16 are .*bfloat16"):
            model(token_ids(1, LENGTH), past_key_values=DynamicCache(config=model.config))


# ---- all of them ---------------------------------------------------------------------------------


@both
@replaying
def test_threads_beside_a_replay_are_let_be(package, name):
    """Others run the model while a context is run again, and neither side sees the other."""
    model, ids, done, found = build("llama"), token_ids(1, LENGTH), threading.Event(), []
    press, plain = example_for(package, name, 0.5, model), model(ids).logits
    alone = held(filled(model, press, ids))

    def beside():
        while not done.is_set():
            with torch.no_grad():
                first = model(ids, past_key_values=DynamicCache()).logits
            found.append(torch.equal(first, plain) and not first.requires_grad)

    other = threading.Thread(target=beside)
    with press(model):
        other.start()
        try:
            for _ in range(5):
                assert held(filled(model, None, ids)) == alone
        finally:
            done.set()
            other.join()
    assert set(found) == {True}
    assert torch.equal(model(ids).logits, plain)


@replaying
def test_embeddings_cannot_be_run_again(package, name, model):
    states = model.get_input_embeddings()(token_ids(1, LENGTH))
    press = example_for(package, name, 0.5, model)
    with press(model), pytest.raises(UnsupportedInputError, match=r"again; .*text model"):
        model(inputs_embeds=states, past_key_values=DynamicCache(config=model.config))


@replaying
def test_padding_is_told_by_a_mask_of_any_form(package, name, model):
    press = example_for(package, name, 0.5, model)
    ids, mask, positions = left_padded(2, LENGTH, [0, 7])
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    found = [
        held(filled(model, press, ids, attention_mask=given, position_ids=positions))
        for given in (mask, causal & mask.bool()[:, None, None])
    ]
    assert found[0] == found[1]


@replaying
def test_padding_beside_sliding_layers_is_refused_before_the_prefill(package, name):
    """Rows are replayed without it, which sliding layers have let go of.

    Not where no cache is filled, and not of rows without padding.
    """
    config, ran = build("gemma2").config, []
    config.layer_types.reverse()  # new caches get sliding layers, unless the first one slides
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids, mask, positions = left_padded(2, LENGTH, [0, 7])
    given = {"attention_mask": mask, "position_ids": positions}
    with example_for(package, name, 0.5, model)(model):
        model.model.layers[0].mlp.register_forward_hook(lambda *_: ran.append(1))
        for cache in (None, DynamicCache(), DynamicCache(config=model.config)):
            with pytest.raises(UnsupportedCacheError, match=r"padded.*Sliding.*one by one"):
                model(ids, past_key_values=cache, **given)
        assert not ran
        model(ids, use_cache=False, **given)
        model(ids, past_key_values=cache)


@pytest.mark.parametrize(("name", "n_prefix"), [("KVzipPress", 6), ("KVgradPress", 0)])
@pytest.mark.parametrize(("length", "n"), [(1, 1), (4, 2), (8, 4), (12, 6)])
def test_a_template_and_sinks_are_kept_before_all_else(package, name, n_prefix, length, n):
    """In all heads alike; where a context ends within the template, its last token is repeated."""
    prefix = token_ids(1, length)[0, :n_prefix].tolist()
    of_layer, prompts = n_prefix > 0, replace(PROMPTS, prefix=prefix)
    press = getattr(package, name)(0.5, of_layer, n_sink=6 - n_prefix, prompts=prompts)
    cache = filled(build("llama", num_layers=2), press, token_ids(1, length))
    assert all(head == [*range(n)] for ((*heads,),) in held(cache) for head in heads)


@pytest.mark.parametrize("name", ["KVzipPress", "KVComposePress"])
def test_rows_of_linear_states_are_refused_before_they_are_run(package, name):
    if IS_5_2:
        pytest.skip("jamba of transformers 5.2 has a cache without layers, and is refused whole")
    model = tiny_decoder("jamba")
    cache = DynamicCache(config=model.config)
    press = example_for(package, name, 0.5, build("llama"))
    with press(model), pytest.raises(UnsupportedCacheError, match="LinearAttentionLayer"):
        model(token_ids(1, LENGTH), past_key_values=cache)
    assert not cache.get_seq_length(1)


@both
@replaying
def test_what_others_wrap_inside_the_scope_stays_in_the_replay(package, name, model):
    press, ids = example_for(package, name, 0.5, model), token_ids(1, LENGTH)
    expected = held(filled(model, press, ids))
    with press(model):
        for layer in model.model.layers:
            layer.self_attn.forward = partial(layer.self_attn.forward)
        assert held(filled(model, None, ids)) == expected


# ---- positions -----------------------------------------------------------------------------------


def test_frequencies_that_adapt_are_put_back(package):
    model, ids, other = build("llama"), *token_ids(2, 40).split(1)
    model.config.max_position_embeddings = 32
    rotating(model, "dynamic")
    before = model(other).logits
    filled(model, example_for(package, "KVzipPress", 0.5, model), ids)
    assert torch.equal(model(other).logits, before)


def test_a_table_of_positions_that_ends_before_the_replay(package):
    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    with pytest.raises(UnsupportedInputError, match="64 positions"):
        filled(model, example_for(package, "KVzipPress", 0.5, model), token_ids(1, 40))
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    with pytest.raises(UnsupportedCacheError, match="offloaded"):
        filled(model, example_for(package, "KVComposePress", 0.5, model), token_ids(1, 8), cache)
