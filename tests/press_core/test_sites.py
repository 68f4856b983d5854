"""Every attention module is found, and described as its family computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from experiments.testbed.families import FAMILIES, HYBRID, NO_GQA, NO_ROPE, build
from press_core import UnsupportedModelError, attention_sites

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
ATTENTION_NAMES = {"gpt2": "transformer.h.{}.attn", "gpt_neox": "gpt_neox.layers.{}.attention"}
ROTARY_CHANNELS = {"gpt_neox": 4, "stablelm": 8}  # a quarter and a half of 16


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_described_as_it_is_built(family: str) -> None:
    sizes: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    model = build(family, attn_implementation="eager", **sizes)
    sites = attention_sites(model)

    layers = [1, 3] if family in HYBRID else [0, 1]  # hybrids: sliding, full, sliding, full
    name = ATTENTION_NAMES.get(family, "model.layers.{}.self_attn")
    assert [site.layer_idx for site in sites] == layers
    assert [site.name for site in sites] == [name.format(layer) for layer in layers]
    for site in sites:
        assert site.module is model.get_submodule(site.name)
        assert site.num_heads == HEADS
        assert site.num_kv_heads == (HEADS if family in NO_GQA else KV_HEADS)
        assert site.head_dim == HEAD_DIM
        scaled_by = 24 if family in ("gemma2", "gemma3_text") else HEAD_DIM
        assert site.scaling == pytest.approx(scaled_by**-0.5)
        assert site.softcap == (20.0 if family == "gemma2" else None)
        assert (site.sinks is not None) == (family == "gpt_oss")
        assert not site.is_sliding
        assert site.goes_through_interface
        assert site.attn_implementation == "eager"
        if family in NO_ROPE:
            assert site.rotary is None
        else:
            assert site.rotary is not None
            assert site.rotary.n_channels == ROTARY_CHANNELS.get(family, HEAD_DIM)
            layer_type = "full_attention" if family == "gemma3_text" else None
            assert site.rotary.layer_type == layer_type


def test_the_implementation_in_force_is_read_when_asked_for() -> None:
    model = build("llama", attn_implementation="eager")
    site = attention_sites(model)[0]
    model.set_attn_implementation("sdpa")
    assert site.attn_implementation == "sdpa"


# ---- the query, as a hook finds it ---------------------------------------------------------------


@pytest.mark.parametrize("length", [1, HEADS, 7])  # q = H: the shape does not tell the layout
@pytest.mark.parametrize("family", FAMILIES)
def test_the_query_source_gives_the_query_that_the_model_computes(
    family: str, length: int, record: Callable[..., Any]
) -> None:
    recorded = record(family, length)
    (collected,) = recorded.collected
    assert collected.shape == (2, HEADS, length, HEAD_DIM)
    if family in NO_ROPE:
        assert torch.equal(collected, recorded.query)
        return
    (before_rope,) = recorded.before_rope
    n_channels = before_rope.shape[-1]  # StableLM hands over the rotated channels only
    assert torch.equal(collected[..., :n_channels], before_rope)
    assert torch.equal(collected[..., n_channels:], recorded.query[..., n_channels:])


def test_an_unknown_projection_is_refused_by_its_name() -> None:
    site = _llama_site()
    attention: Any = site.module
    attention.query = attention.q_proj
    del attention.q_proj
    with pytest.raises(UnsupportedModelError) as error:
        _ = site.query_source
    for named in ("LlamaAttention", site.name, "query", "k_proj", "patch_impl"):
        assert named in str(error.value)


def test_an_unknown_step_beside_the_projection_is_refused_by_its_name() -> None:
    site = _llama_site()
    site.module.add_module("query_rescaler", nn.Identity())
    with pytest.raises(UnsupportedModelError, match="query_rescaler"):
        _ = site.query_source


def test_a_projection_of_another_width_is_refused() -> None:
    site = _llama_site()
    attention: Any = site.module
    attention.q_proj = nn.Linear(64, 2 * HEADS * HEAD_DIM)  # a gate beside the query, say
    with pytest.raises(UnsupportedModelError, match="q_proj"):
        _ = site.query_source


def test_a_query_clipped_after_the_projection_is_refused() -> None:
    site = _llama_site()
    site.module.config.clip_qkv = 8.0
    with pytest.raises(UnsupportedModelError, match="clip_qkv"):
        _ = site.query_source


def _llama_site() -> Any:
    return attention_sites(build("llama", num_layers=1))[0]


# ---- models without a site -----------------------------------------------------------------------


def test_a_model_of_sliding_layers_only_is_refused() -> None:
    config = AutoConfig.for_model(
        "mistral",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        sliding_window=16,
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        UnsupportedModelError, match=r"all 3 attention layers .*sliding_window=None"
    ):
        attention_sites(model)


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Sequential(nn.MultiheadAttention(8, 2))])
def test_a_module_without_transformers_attention_is_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError, match=type(model).__name__):
        attention_sites(model)


# ---- the arguments of forward --------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_an_argument_is_found_however_it_is_passed(family: str) -> None:
    site = attention_sites(build(family, num_layers=1))[0]
    names = _parameters(site)
    values = [object() for _ in names]
    for n_positional in range(len(names) + 1):
        args = tuple(values[:n_positional])
        kwargs = dict(zip(names[n_positional:], values[n_positional:], strict=True))
        for name, value in zip(names, values, strict=True):
            assert site.argument(name, args, kwargs) is value
    assert site.argument("attention_mask", (), {}) is None
    assert site.argument("position_ids_of_nobody", tuple(values), {}) is None


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_an_argument_is_replaced_where_it_was_passed(family: str) -> None:
    site = attention_sites(build(family, num_layers=1))[0]
    names = _parameters(site)
    values = [object() for _ in names]
    at, new = names.index("attention_mask"), object()

    args, kwargs = site.replace_argument("attention_mask", new, tuple(values), {"other": 1})
    assert args == (*values[:at], new, *values[at + 1 :])
    assert kwargs == {"other": 1}

    given = {"attention_mask": values[at], "other": 1}
    args, kwargs = site.replace_argument("attention_mask", new, tuple(values[:1]), given)
    assert args == tuple(values[:1])
    assert kwargs == {"attention_mask": new, "other": 1}
    assert given["attention_mask"] is values[at]

    args, kwargs = site.replace_argument("attention_mask", new, tuple(values[:1]), {})
    assert (args, kwargs) == (tuple(values[:1]), {"attention_mask": new})


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_and_hidden_states_are_found_as_the_model_passes_them(family: str) -> None:
    model = build(family, num_layers=1, attn_implementation="eager")
    site = attention_sites(model)[0]
    calls: list[tuple[Any, Any]] = []

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((site.cache(args, kwargs), site.argument("hidden_states", args, kwargs)))

    cache = DynamicCache()
    with site.module.register_forward_pre_hook(see, with_kwargs=True), torch.no_grad():
        model(torch.arange(3, 8)[None], past_key_values=cache)
    ((seen, hidden_states),) = calls
    assert seen is cache
    assert hidden_states.shape == (1, 5, HEADS * HEAD_DIM)


def _parameters(site: Any) -> list[str]:
    parameters = inspect.signature(type(site.module).forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
