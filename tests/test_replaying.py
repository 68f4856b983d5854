"""Presses that run a context again: what they leave behind, and where they cannot be had."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from experiments.testbed.recipes import PROMPTS
from press_core import (
    RaggedLayer,
    UnsupportedInputError,
    UnsupportedModelError,
    attention_sites,
)
from tests.slow import Whole
from tests.support import both, build, snapshot, token_ids
from tests.test_headwise import make, tolerance

LENGTH = 40
MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "with gradients": torch.enable_grad,
}


def kvgrad(package: Any, ratio: float = 0.5) -> Any:
    return package.KVgradPress(ratio, chunk_size=16, prompts=PROMPTS)


def kept(cache: Any) -> list[Any]:
    """Positions that the heads of each layer keep."""
    if isinstance(cache.layers[0], RaggedLayer):
        return [layer.slots.tolist() for layer in cache.layers]
    return [layer.positions.tolist() for layer in cache.layers]


# ---- gradients -----------------------------------------------------------------------------------


def with_graph() -> set[int]:
    """Tensors that are part of a graph, wherever they are."""
    gc.collect()
    return {id(x) for x in gc.get_objects() if isinstance(x, Tensor) and x.grad_fn is not None}


@torch.enable_grad()
@both
def test_no_gradient_is_left_behind(package):
    graphs = with_graph()  # to look through all objects takes longer than all that follows
    alive = []
    for mode, frozen in itertools.product(("no_grad", "inference_mode"), (False, True)):
        alive.append(pruned_without_gradients(package, mode, frozen))
    assert with_graph() <= graphs


def pruned_without_gradients(package: Any, mode: str, frozen: bool) -> tuple[Any, Any]:
    """The model and its cache, neither of which has a gradient that was not there before."""
    model = build("llama")
    model.requires_grad_(not frozen)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # of a training that goes on
    before = snapshot(model)
    cache = DynamicCache(config=model.config)
    with MODES[mode](), kvgrad(package)(model):
        logits = model(token_ids(2, LENGTH), past_key_values=cache).logits
        logits = model(token_ids(2, 3), past_key_values=cache).logits
    assert logits.grad_fn is None
    assert not logits.requires_grad
    for layer in cache.layers:
        for states in (layer.keys, layer.values, layer.recent.keys, layer.recent.values):
            assert not states.requires_grad
    for parameter in model.parameters():
        assert parameter.requires_grad is not frozen
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert snapshot(model) == before
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    return model, cache


@both
def test_the_same_is_kept_whatever_the_caller_does_with_gradients(package):
    model, found = build("llama"), []
    for mode in MODES.values():
        for frozen in (False, True):
            model.requires_grad_(not frozen)
            cache = DynamicCache(config=model.config)
            with mode(), kvgrad(package)(model):
                model(token_ids(2, LENGTH), past_key_values=cache)
            found.append(kept(cache))
    assert all(other == found[0] for other in found)


@torch.enable_grad()
@both
def test_gradients_of_the_caller_are_what_they_were(package):
    """The replay goes back through itself alone."""
    model, ids = build("llama", dtype=torch.float64), token_ids(1, LENGTH)
    weights, gradients = list(model.parameters()), []
    for press in (None, kvgrad(package)):
        scope = None if press is None else press.register(model)
        logits = model(ids, past_key_values=DynamicCache(config=model.config)).logits
        gradients.append(torch.autograd.grad(logits.logsumexp(-1).sum(), weights))
        if scope is not None:
            scope.remove()
    for alone, pressed in zip(*gradients, strict=True):
        assert torch.equal(alone, pressed)
    assert all(weight.grad is None for weight in weights)


@both
def test_a_model_made_in_inference_mode_is_refused_before_anything_is_installed(package):
    with torch.inference_mode():
        model = build("llama")
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"made inside torch\.inference_mode"):
        kvgrad(package).register(model)
    assert snapshot(model) == before


@both
def test_attention_without_a_gradient_is_refused_when_it_is_opened(package):
    """PyTorch has none for flex_attention on a CPU."""
    model = build("llama", attn_implementation="flex_attention")
    with pytest.raises(
        UnsupportedModelError, match=r"no gradient of Llama.*flex_attention.*backward on CPU"
    ):
        kvgrad(package).register(model)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


@both
def test_gradient_checkpointing_is_refused_by_name(package):
    """It takes the cache away from a training model."""
    model = build("llama").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(UnsupportedModelError, match=r"gradient checkpointing.*model\.eval\(\)"):
        kvgrad(package).register(model)


@both
def test_gradients_beyond_the_range_of_the_dtype_are_told(package):
    model = build("llama", dtype=torch.float16)
    with kvgrad(package)(model):
        model.model.norm.weight.fill_(1)
        model.model.layers[-1].mlp.down_proj.weight.mul_(6e4)
        with pytest.raises(UnsupportedInputError, match=r"float16 are beyond its range.*bfloat16"):
            model(token_ids(1, LENGTH), past_key_values=DynamicCache(config=model.config))


# ---- all of them ---------------------------------------------------------------------------------

ALL = {
    "kvcompose": lambda p: p.KVComposePress(0.5),
    "kvcompose, by heads": lambda p: p.KVComposePress(0.5, structured=False),
    "kvgrad": kvgrad,
    "kvzip": lambda p: p.KVzipPress(0.5, chunk_size=16, prompts=PROMPTS),
}
every = pytest.mark.parametrize("name", ALL)


@both
@every
def test_threads_beside_a_replay_are_let_be(package, name):
    """Others run the model while a context is run again, and neither side sees the other."""
    model, ids = build("llama"), token_ids(1, LENGTH)

    def run() -> Any:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        return cache

    plain = model(ids).logits
    with ALL[name](package)(model):
        alone = kept(run())
    done, found = threading.Event(), []

    def beside() -> None:
        while not done.is_set():
            with torch.no_grad():
                cache = DynamicCache(config=model.config)
                first = model(ids[:, :-1], past_key_values=cache).logits
                found.append(first.requires_grad)

    other = threading.Thread(target=beside)
    with ALL[name](package)(model):
        other.start()
        try:
            for _ in range(5):
                assert kept(run()) == alone
        finally:
            done.set()
            other.join()
    assert found
    assert not any(found)
    assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
def test_layers_of_composite_tokens_are_decoded(package, family):
    """As by a model that has everything and is shown what they keep (by heads: test_headwise)."""
    model, whole = make(family), Whole(make(family))
    cache = DynamicCache(config=model.config)
    parts = token_ids(2, LENGTH + 6).split([LENGTH, 4, 1, 1], dim=1)
    chosen: dict[int, Any] = {}
    with package.KVComposePress(0.6)(model):
        for n_seen, ids in zip((0, LENGTH, LENGTH + 4, LENGTH + 5), parts, strict=True):
            if n_seen:
                whole.shown = {
                    i: [[[*head, *range(LENGTH, n_seen)] for head in row] for row in rows]
                    for i, rows in chosen.items()
                }
            logits = model(ids, past_key_values=cache).logits
            torch.testing.assert_close(logits, whole(ids), rtol=0, atol=tolerance(model))
            for site in attention_sites(model) if not n_seen else ():
                rows = cache.layers[site.layer_idx].positions.tolist()
                chosen[site.layer_idx] = [[[p for p in h if p >= 0] for h in row] for row in rows]
    lengths = [len(rows[0][0]) for rows in chosen.values()]
    assert sum(lengths) == pytest.approx(0.4 * LENGTH * len(lengths), abs=1)


@every
def test_embeddings_cannot_be_run_again(package, name):
    model = build("llama")
    states = model.get_input_embeddings()(token_ids(1, LENGTH))
    with (
        ALL[name](package)(model),
        pytest.raises(UnsupportedInputError, match="runs the tokens of the context again"),
    ):
        model(inputs_embeds=states, past_key_values=DynamicCache(config=model.config))
