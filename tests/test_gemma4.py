"""Gemma-4: layers that read another's cache, and numbers of KV heads that differ by layer."""

import pytest
import torch
import transformers
from transformers import DynamicCache

from press_core import UnsupportedModelError, kept_lengths
from tests.presses import TABLES
from tests.support import assert_refused, both, left_padded, token_ids

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "Gemma4ForCausalLM"), reason="this transformers has no Gemma-4"
)
LENGTH, ASKED = 30, {"max_new_tokens": 4, "do_sample": False}


def build(variant, attention):
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        global_head_dim=16, num_hidden_layers=12, intermediate_size=32, vocab_size=128,
        vocab_size_per_layer_input=128, hidden_size_per_layer_input=8, sliding_window=8,
        **{"num_kv_shared_layers": 0, **TABLES["gemma4"][variant]},
    )  # fmt: skip
    config._attn_implementation = attention
    return transformers.Gemma4ForCausalLM(config).eval()


def decoded(model, press):
    """What the full layers hold after four tokens, and the tokens."""
    cache = DynamicCache(config=model.config)
    with press(model):
        tokens = model.generate(token_ids(1, LENGTH), past_key_values=cache, **ASKED)
    full = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    lengths = kept_lengths(cache)
    return [int(lengths[i].max()) for i in full if i < len(lengths) and lengths[i].numel()], tokens


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", TABLES["gemma4"])
def test_generate(package, variant, attention):
    model = build(variant, attention)
    held, tokens = decoded(model, package.SnapKVPress(0.5, window_size=4))
    assert set(held) == {LENGTH // 2 + 3}
    assert len(held) == (2 if variant == "keys are values" else 1)
    whole, expected = decoded(model, package.SnapKVPress(0.0, window_size=4))
    assert set(whole) == {LENGTH + 3}
    bare = model.generate(token_ids(1, LENGTH), **ASKED)
    assert torch.equal(expected, bare)
    assert tokens.shape == bare.shape


@both
@pytest.mark.parametrize("variant", ["shared", "both"])
def test_heads_of_a_shared_layer_keep_as_many(package, variant):
    press = package.AdaKVPress(package.SnapKVPress(0.5, window_size=4))
    assert_refused(press, build(variant, "sdpa"), UnsupportedModelError, "Gemma4TextAttention")


@both
def test_a_turn_of_which_shared_layers_read_the_last_token(package):
    """Under `generate`, by which the model runs no other token through them."""
    model, press, found = build("shared", "sdpa"), package.SnapKVPress(0.5, window_size=4), []
    ids, mask, positions = left_padded(2, 33, [0, 3])
    for n in (0, 1):
        cache = DynamicCache(config=model.config)
        given = {"attention_mask": mask[:, :30], "position_ids": positions[:, :30]}
        with torch.no_grad(), press(model):
            model(ids[:, :30], past_key_values=cache, **given)
            given = {"attention_mask": mask, "position_ids": positions[:, 30:]}
            output = model(ids[:, 30:], past_key_values=cache, logits_to_keep=n, **given)
        found.append(output.logits[:, -1])
    torch.testing.assert_close(*found)
