"""Attention weights are those of the model: explicit softmaxes, whole or in tiles."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hooks_impl
from experiments.testbed.families import FAMILIES
from press_core import attention_sites, kept_lengths
from press_core.attention import attention_tiles, mean_attention, window_attention
from press_core.tiles import NUMBERS
from tests.press_core.drawn import BATCH, GROUP, KV_HEADS, called, drawn_call, of_family, with_sinks
from tests.press_core.recorded import record
from tests.support import build, token_ids

LENGTH = 23


@pytest.mark.parametrize("at_once", [1, 4, 100, 1000, 100_000])
@pytest.mark.parametrize("window", [1, 5, LENGTH])
def test_tiles_of_attention_are_parts_of_all_of_it(window, at_once, monkeypatch):
    monkeypatch.setitem(NUMBERS, "cpu", at_once)
    call = drawn_call(LENGTH, site=with_sinks())
    whole, seen = window_attention(call, window), torch.zeros(KV_HEADS, window)
    smallest = BATCH * GROUP * LENGTH
    for heads, rows, weights in attention_tiles(call, call.queries(window)):
        assert weights.numel() <= max(at_once, smallest)
        end = LENGTH - window + rows.stop
        assert weights.shape[-1] == end
        part = whole[:, heads, :, rows]
        torch.testing.assert_close(weights, part[..., :end])
        assert not part[..., end:].any()
        seen[heads, rows] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("window", [1, 5, LENGTH])
def test_mean_attention_is_the_mean_of_all_rows(window):
    call = drawn_call(LENGTH, site=with_sinks())
    weights, factors = window_attention(call, window), torch.arange(1.0, window + 1)
    found = mean_attention(call, call.queries(window))
    torch.testing.assert_close(found, weights.mean(dim=(2, 3)))
    weighed = mean_attention(call, call.queries(window), factors)
    torch.testing.assert_close(weighed, (weights * factors.view(-1, 1)).mean(dim=(2, 3)))
    assert not mean_attention(call, call.queries()[:, :, :0]).any(), "none, and no NaN"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_the_family_itself_computes(family):
    recorded = record(family, 9)
    weights = window_attention(of_family(recorded), 9).flatten(1, 2)
    torch.testing.assert_close(weights, recorded.weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "option", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}]
)
def test_weights_are_scaled_as_the_options_of_gpt2_say(option):
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}
    config = AutoConfig.for_model("gpt2", **sizes, bos_token_id=1, eos_token_id=2, **option)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    of_gpt2 = attention_sites(model)[2]
    projected = []
    with of_gpt2.query_module.register_forward_hook(lambda *call: projected.append(call[2])):
        output = model(torch.arange(3, 12)[None], output_attentions=True)
    query, key, value = (x.view(1, 9, 2, 8).transpose(1, 2) for x in projected[0].chunk(3, dim=-1))
    states = torch.zeros(1, 9, 16)
    call = called(query, site=of_gpt2, hidden_states=states, keys=key, values=value)
    weights = window_attention(call, 9).flatten(1, 2)
    torch.testing.assert_close(weights, output.attentions[2], atol=1e-5, rtol=1e-4)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that anything makes."""

    numbers = 0

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return made


@pytest.mark.parametrize("name", ["ObservedAttentionPress", "KVComposePress"])
def test_weights_that_nobody_returns_take_no_matrix(name, monkeypatch):
    """Under sdpa twice the context takes twice the memory, not four times."""
    monkeypatch.setitem(NUMBERS, "cpu", 2**16)
    monkeypatch.setattr("press_core.replay.rows.AT_A_TIME", 64)
    press, model = hooks_impl.PRESSES[name](compression_ratio=0.5), build("llama", num_layers=1)
    sizes = list[int]()
    for length in (512, 1024, 2048):
        ids, cache = token_ids(1, length), DynamicCache()
        with press(model), Largest() as largest:
            model(ids, past_key_values=cache)
        assert int(kept_lengths(cache)[0][0, 0]) == length // 2
        sizes.append(largest.numbers)
    assert sizes[2] <= 2.05 * sizes[1] <= 4.2 * sizes[0]
    assert sizes[2] < 2048 * 2048 / 2
