"""Models whose weights are elsewhere between forwards, as accelerate has it."""

import pytest
import torch
from accelerate import cpu_offload

import hooks_impl
from press_core import UnsupportedModelError, probe
from tests.support import build, context_for, example_for, held, ran, token_ids

READ_WEIGHTS = ("CriticalKVPress", "CriticalAdaKVPress", "KVgradPress")
"""Presses that read weights of an attention module, and refuse what is not there."""


def offloaded():
    """Such a model, which will be probed itself."""
    probe._known.clear()
    model = build("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    return model


@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
def test_presses_do_the_same_there(package, name):
    whole = build("llama")
    press = example_for(package, name, 0.5, whole)
    given = [context_for(name, 48), token_ids(1, 2)]
    expected, answers = ran(whole, press, given)
    if name in READ_WEIGHTS:
        with pytest.raises(UnsupportedModelError, match="offloaded"):
            press.register(offloaded())
        return
    cache, logits = ran(offloaded(), press, given)
    assert held(cache) == held(expected)
    assert torch.equal(logits[-1], answers[-1])
