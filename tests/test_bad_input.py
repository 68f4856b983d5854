"""What a press cannot do is a clear error, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

import hooks_impl
import patch_impl
from experiments.questions.architectures.decoders import build as build_tiny
from experiments.questions.architectures.decoders import decoders
from press_core import (
    HyperparameterError,
    UnsupportedInputError,
    UnsupportedModelError,
    kept_lengths,
)
from tests.support import build, context_for, example_for, snapshot, token_ids

PACKAGES = [hooks_impl, patch_impl]
TOLD_A_RATIO = sorted(
    name
    for name, press in hooks_impl.PRESSES.items()
    if "compression_ratio" in press.__dataclass_fields__
)
both = pytest.mark.parametrize("package", PACKAGES, ids=["hooks", "patches"])


@both
@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan")])
@pytest.mark.parametrize("name", TOLD_A_RATIO)
def test_ratio_outside_of_its_range(package, ratio, name):
    with pytest.raises(
        HyperparameterError, match=r"compression_ratio must be a number in \[0, 1\)"
    ):
        package.PRESSES[name](compression_ratio=ratio)


@both
@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("StreamingLLMPress", "n_sink", -1),
        ("SnapKVPress", "window_size", 0),
        ("SnapKVPress", "kernel_size", 4),
        ("ExpectedAttentionPress", "n_future_positions", 0),
        ("ExpectedAttentionPress", "n_sink", -1),
        ("ExpectedAttentionPress", "epsilon", -1.0),
        ("LagKVPress", "n_sink", -1),
        ("LagKVPress", "lag_size", 0),
    ],
)
def test_fields_outside_of_their_range(package, name, field, value):
    with pytest.raises(HyperparameterError, match=rf"{name}\({field}={value}\)"):
        package.PRESSES[name](**{field: value})


@both
def test_a_field_changed_for_the_worse(package):
    """Checked again when a scope opens, before anything is installed."""
    model = build("llama")
    before, press = snapshot(model), package.KnormPress(0.5)
    press.compression_ratio = 2.0
    with pytest.raises(HyperparameterError), press(model):
        pytest.fail("entered")
    assert snapshot(model) == before


@both
def test_a_model_without_attention(package):
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UnsupportedModelError, match=r"Sequential .* no attention module"):
        package.KnormPress(0.5).register(model)
    assert not model[0]._forward_hooks


@both
def test_a_model_of_sliding_layers_only(package):
    config = MistralConfig(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1,
        intermediate_size=32, vocab_size=64, sliding_window=16,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"all 1 attention layers .* sliding window"):
        package.KnormPress(0.5).register(MistralForCausalLM(config))


@both
def test_rope_where_there_is_none(package):
    model = build("gpt2")
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match="ExpectedAttentionPress needs rotary"):
        package.ExpectedAttentionPress(0.5).register(model)
    assert snapshot(model) == before


def test_a_query_that_no_hook_can_find():
    """The one place where the mechanisms differ in reach: a patch sees the query all the same."""
    model = build_tiny(decoders()["jetmoe"])  # experts compute its queries
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match="patch_impl"):
        hooks_impl.SnapKVPress(0.5, window_size=4).register(model)
    assert snapshot(model) == before
    cache = DynamicCache(config=model.config)
    with patch_impl.SnapKVPress(0.5, window_size=4)(model), torch.no_grad():
        model(token_ids(1, 40), past_key_values=cache)
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [20, 20, 20, 20]
    with hooks_impl.KnormPress(0.5)(model):  # needs no queries, so nothing is in the way
        pass


@both
@pytest.mark.parametrize("length", [1, 2, 7, 8])
@torch.no_grad()
def test_a_window_larger_than_the_context(package, length):
    """Documented: a context too short for the press is left whole."""
    model = build("llama")
    cache = DynamicCache(config=model.config)
    with package.SnapKVPress(0.9, window_size=8)(model):
        model(token_ids(1, length), past_key_values=cache)
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [length] * 2


@both
@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
@torch.no_grad()
def test_never_zero(package, name):
    model = build("llama")
    press = example_for(package, name, 0.999, model)
    for length in (1, 2, 3, 70):
        if length < 10 and name == "FinchPress":
            continue  # no room for a delimiter
        cache = DynamicCache(config=model.config)
        with press(model):
            model(context_for(name, length), past_key_values=cache)
        assert all(int(kept.min()) >= 1 for kept in kept_lengths(cache))


def test_queries_that_no_patch_can_see():
    """The other way round: GPT-2 can be told to attend by itself, past the registry."""
    model = build("gpt2", attn_implementation="eager")
    for block in model.transformer.h:
        block.attn.reorder_and_upcast_attn = True
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match="hooks_impl"):
        patch_impl.TOVAPress(0.5).register(model)
    assert snapshot(model) == before
    cache = DynamicCache(config=model.config)
    with hooks_impl.TOVAPress(0.5)(model), torch.no_grad():
        model(token_ids(1, 40), past_key_values=cache)
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [20, 20]


@both
@torch.no_grad()
def test_a_bias_on_logits_is_no_padding(package):
    """A mask in the prefill that changes how much is seen of tokens, and hides none."""
    model = build("llama", attn_implementation="eager")
    least = torch.finfo(torch.float32).min
    mask = torch.full((60, 60), least).triu(1)[None, None]
    with package.KnormPress(0.5)(model):
        model(token_ids(1, 60), attention_mask=mask, past_key_values=DynamicCache())
        mask[..., :30] += mask[..., :30].eq(0) * -0.01
        with pytest.raises(UnsupportedInputError, match="adds something to the logits"):
            model(token_ids(1, 60), attention_mask=mask, past_key_values=DynamicCache())
