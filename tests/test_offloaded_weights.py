"""Models whose weights are elsewhere between forwards, as accelerate has it."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from transformers import DynamicCache

import hooks_impl
import patch_impl
from press_core import UnsupportedModelError, kept_lengths
from press_core.model import probe
from press_core.model.probe import verified_sites
from tests.support import build, context_for, example_for, token_ids

PACKAGES = {"hooks": hooks_impl, "patches": patch_impl}
READ_WEIGHTS = ("CriticalKVPress", "CriticalAdaKVPress", "KVgradPress")
"""Presses that read weights of an attention module, and refuse what is not there."""


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the offloaded model itself is probed."""
    monkeypatch.setattr(probe, "_known", probe.weakref.WeakKeyDictionary())


def offloaded():
    model = build("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    return model


@torch.no_grad()
def run(model, press, name):
    cache = DynamicCache(config=model.config)
    with press(model):
        model(context_for(name, 48), past_key_values=cache)
        logits = model(token_ids(1, 2), past_key_values=cache).logits
    return logits, [lengths.tolist() for lengths in kept_lengths(cache)]


def test_a_probe_verifies_them():
    assert all(site.verified and not site.refusals for site in verified_sites(offloaded()))


@pytest.mark.parametrize("mechanism", PACKAGES)
@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
def test_presses_do_the_same_there(name, mechanism):
    whole = build("llama")
    press = example_for(PACKAGES[mechanism], name, 0.5, whole)
    expected = run(whole, press, name)
    probe._known.clear()
    if name in READ_WEIGHTS:
        with pytest.raises(UnsupportedModelError, match="offloaded between forwards"):
            press.register(offloaded())
        return
    logits, kept = run(offloaded(), press, name)
    assert kept == expected[1]
    assert torch.equal(logits, expected[0])
