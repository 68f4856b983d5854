"""The arguments of a forward are found, and replaced, however they are passed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from experiments.testbed.families import FAMILIES
from press_core import AttentionSite, UnsupportedInputError, attention_sites
from press_core.cache.reading import first_position
from press_core.model.decoder import decoder_of
from press_core.model.forward import AttentionForward, DecoderForward
from tests.support import build

WIDTH = 64


def _site(family: str) -> AttentionSite:
    return attention_sites(build(family, num_layers=1))[0]


def _parameters(site: AttentionSite) -> list[str]:
    parameters = inspect.signature(type(site.module).forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_an_argument_is_found_however_it_is_passed(family: str) -> None:
    site = _site(family)
    names = _parameters(site)
    values = [object() for _ in names]
    for n_positional in range(len(names) + 1):
        args = tuple(values[:n_positional])
        kwargs = dict(zip(names[n_positional:], values[n_positional:], strict=True))
        forward = AttentionForward(args, kwargs, site)
        for name, value in zip(names, values, strict=True):
            assert forward.argument(name) is value
    assert AttentionForward((), {}, site).argument("attention_mask") is None
    assert AttentionForward(tuple(values), {}, site).argument("position_ids_of_nobody") is None


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_an_argument_is_replaced_where_it_was_passed(family: str) -> None:
    site = _site(family)
    names = _parameters(site)
    values = [object() for _ in names]
    at, new = names.index("attention_mask"), object()

    def replaced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        forward = AttentionForward(args, kwargs, site)
        changed = forward.with_argument("attention_mask", new)
        assert (forward.args, forward.kwargs) == (args, kwargs)
        assert changed.site is site
        return changed.args, changed.kwargs

    args, kwargs = replaced(tuple(values), {"other": 1})
    assert args == (*values[:at], new, *values[at + 1 :])
    assert kwargs == {"other": 1}

    given = {"attention_mask": values[at], "other": 1}
    args, kwargs = replaced(tuple(values[:1]), given)
    assert args == tuple(values[:1])
    assert kwargs == {"attention_mask": new, "other": 1}
    assert given["attention_mask"] is values[at]

    assert replaced(tuple(values[:1]), {}) == (tuple(values[:1]), {"attention_mask": new})


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_and_hidden_states_are_found_as_the_model_passes_them(family: str) -> None:
    model = build(family, num_layers=1, attn_implementation="eager")
    site = attention_sites(model)[0]
    forwards: list[AttentionForward] = []

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forwards.append(AttentionForward(args, kwargs, site))

    cache = DynamicCache()
    with site.module.register_forward_pre_hook(see, with_kwargs=True), torch.no_grad():
        model(torch.arange(3, 8)[None], past_key_values=cache)
    (forward,) = forwards
    assert forward.cache is cache
    assert forward.layer is cache.layers[site.layer_idx]
    assert forward.hidden_states.shape == (1, 5, WIDTH)
    assert forward.n_tokens == 5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_first_position_is_that_of_the_model(family: str) -> None:
    model = build(family, num_layers=1)
    site = attention_sites(model)[0]
    found: list[Any] = []

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(first_position(AttentionForward(args, kwargs, site)).tolist())

    ids, cache = torch.arange(3, 8)[None], DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with site.module.register_forward_pre_hook(see, with_kwargs=True):
            model(ids, past_key_values=cache)
    assert found == [[5]]


@pytest.mark.parametrize("positional", [True, False])
def test_a_decoder_is_asked_for_its_token_ids(positional: bool) -> None:
    model = build("llama", num_layers=1)
    decoder = decoder_of(model, attention_sites(model))
    assert decoder is model.model
    ids, cache = torch.arange(3, 8)[None], object()
    args, kwargs = ((ids,), {}) if positional else ((), {"input_ids": ids})
    forward = DecoderForward(args, {**kwargs, "past_key_values": cache}, decoder)
    assert forward.token_ids("to be read") is ids
    assert forward.cache is cache
    shorter = forward.with_argument("input_ids", ids[:, :2])
    assert shorter.token_ids("to be read").tolist() == [[3, 4]]
    assert forward.token_ids("to be read") is ids


def test_embeddings_in_place_of_token_ids_are_refused() -> None:
    model = build("llama", num_layers=1)
    forward = DecoderForward((), {"inputs_embeds": torch.zeros(1, 2, WIDTH)}, model)
    with pytest.raises(UnsupportedInputError, match=r"to be read; pass input_ids"):
        forward.token_ids("to be read")
