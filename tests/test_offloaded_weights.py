"""Models whose weights are elsewhere between forwards, as accelerate has it."""

import pytest
import torch
from accelerate import cpu_offload
from transformers import DynamicCache

import hooks_impl
from press_core import UnsupportedModelError, kept_lengths, probe
from tests.support import build, context_for, example_for, token_ids

READ_WEIGHTS = ("CriticalKVPress", "CriticalAdaKVPress", "KVgradPress")
"""Presses that read weights of an attention module, and refuse what is not there."""


def offloaded():
    """Such a model, which will be probed itself."""
    probe._known.clear()
    model = build("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    return model


def run(model, press, name):
    cache = DynamicCache(config=model.config)
    with press(model):
        model(context_for(name, 48), past_key_values=cache)
        logits = model(token_ids(1, 2), past_key_values=cache).logits
    return logits, [lengths.tolist() for lengths in kept_lengths(cache)]


@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
def test_presses_do_the_same_there(package, name):
    whole = build("llama")
    press = example_for(package, name, 0.5, whole)
    expected = run(whole, press, name)
    if name in READ_WEIGHTS:
        with pytest.raises(UnsupportedModelError, match="offloaded between forwards"):
            press.register(offloaded())
        return
    logits, kept = run(offloaded(), press, name)
    assert kept == expected[1]
    assert torch.equal(logits, expected[0])
