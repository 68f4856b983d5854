"""The arguments of a forward are found, and replaced, however they are passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from experiments.testbed.families import FAMILIES
from press_core import attention_sites
from press_core.cache.caches import known
from press_core.cache.reading import first_position
from press_core.forward import Arguments, Forward, names_of
from press_core.model.decoder import decoder_of
from tests.support import build

NAMES = ("hidden_states", "attention_mask", "cache")


@given(st.integers(0, 3), st.sets(st.sampled_from([*NAMES, "other"])), st.data())
def test_arguments_are_found_and_replaced_however_they_are_passed(
    n_positional: int, by_name: set[str], data: st.DataObject
) -> None:
    args = NAMES[:n_positional]  # each argument is its own name
    kwargs = {name: name for name in by_name - set(args)}
    passed, given_kwargs = {*args, *kwargs}, dict(kwargs)
    arguments = Arguments(args, kwargs, NAMES)
    for name in (*NAMES, "other", "nobody"):
        assert arguments.get(name) == (name if name in passed else None)
    new = dict.fromkeys(data.draw(st.sets(st.sampled_from([*NAMES, "other"]))), "new")
    changed = arguments.replace(**new)
    assert (arguments.args, arguments.kwargs, kwargs) == (args, given_kwargs, given_kwargs)
    for name in (*NAMES, "other"):
        assert changed.get(name) == (new.get(name) or arguments.get(name))
    assert len(changed.args) == n_positional  # nothing is passed twice
    assert set(changed.kwargs) == (set(kwargs) | set(new)) - set(args)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_models_pass_is_found(family: str) -> None:
    """Cache and hidden states of an attention module, and the position of its first token."""
    model = build(family, num_layers=1, attn_implementation="eager")
    (site,), seen = attention_sites(model), list[Arguments]()

    def see(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Arguments(args, kwargs, site.signature.parameters))

    ids, cache = torch.arange(3, 8)[None], DynamicCache()
    model(ids, past_key_values=cache)
    with site.module.register_forward_pre_hook(see, with_kwargs=True):
        model(ids[:, :3], past_key_values=cache)
    (given,) = seen
    assert given.get(site.signature.cache_name) is cache
    assert given.get("hidden_states").shape == (1, 3, 64)
    cache.crop(-3)
    assert first_position(given, known(cache, 0), 3).tolist() == [5]


@pytest.mark.parametrize("positional", [True, False])
def test_a_decoder_is_found_and_its_forward_described(positional: bool) -> None:
    model: Any = build("llama", num_layers=2)
    decoder = decoder_of(model, [site.name for site in attention_sites(model)])
    assert decoder is model.model
    ids, cache = torch.arange(3, 8)[None], object()
    args, kwargs = ((ids,), {}) if positional else ((), {"input_ids": ids})
    forward = Forward(decoder, Arguments(args, {**kwargs, "past_key_values": cache},
                                         names_of(decoder)))  # fmt: skip
    assert (forward.n_tokens, forward.cache) == (5, cache)
    forward.given = Arguments((), {"inputs_embeds": torch.zeros(1, 2, 64)}, names_of(decoder))
    assert (forward.n_tokens, forward.cache) == (2, None)


def test_what_all_layers_need_is_made_once_for_each_key() -> None:
    forward = Forward(torch.nn.Identity(), Arguments((), {}, ()))
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    mask, other = torch.zeros(1), torch.zeros(1)
    for _ in range(2):
        for name, key in (("a", (mask, 1)), ("b", (mask, 2)), ("c", (other, 1))):
            assert forward.once(lambda name=name: make(name), *key) == name
    assert made == ["a", "b", "c"]
