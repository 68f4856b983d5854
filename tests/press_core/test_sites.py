"""Every attention module is found, and described as its family computes."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.testbed.families import FAMILIES, HYBRID, NO_GQA, NO_ROPE
from press_core import attention_sites
from tests.support import build

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
ATTENTION_NAMES = {"gpt2": "transformer.h.{}.attn", "gpt_neox": "gpt_neox.layers.{}.attention"}
HANDED_OVER = {"stablelm": 8}  # of 16 channels, to the function that rotates them


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
        assert site.softmax.softcap == (20.0 if family == "gemma2" else None)
        assert (site.sinks is not None) == (family == "gpt_oss")
        assert site.signature.interface is not None
        assert site.attn_implementation == "eager"
        if family in NO_ROPE:
            assert site.rotary is None
        else:
            assert site.rotary is not None
            assert site.rotary.n_channels == HANDED_OVER.get(family, HEAD_DIM)
            layer_type = "full_attention" if family == "gemma3_text" else None
            assert site.rotary.layer_type == layer_type


def test_the_implementation_in_force_is_read_when_asked_for() -> None:
    model = build("llama", attn_implementation="eager")
    site = attention_sites(model)[0]
    model.set_attn_implementation("sdpa")
    assert site.attn_implementation == "sdpa"
