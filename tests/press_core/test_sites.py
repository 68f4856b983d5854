"""Every attention module is found, and described as its family computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.testbed.families import FAMILIES, HYBRID, NO_GQA, NO_ROPE
from press_core import UnsupportedModelError, attention_sites
from tests.support import build

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
