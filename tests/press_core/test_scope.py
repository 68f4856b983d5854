"""A scope takes off all that it has installed, and lets go of the model when it closes."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

import hooks_impl
import patch_impl
from patch_impl import KnormPress
from press_core.scope import bound_to
from tests.support import build


class Removable:
    def __init__(self, name, removed):
        self.name, self.removed = name, removed

    def remove(self):
        self.removed.append(self.name)
        if self.name == "stuck":
            raise RuntimeError(self.name)


@pytest.mark.parametrize("names", [["a", "b", "c"], ["a", "stuck", "c"]])
def test_what_was_installed_comes_off_once_the_last_first(names):
    """Also if one part cannot."""
    state, removed = bound_to(KnormPress(0.5), build("llama", num_layers=2)), list[str]()
    state.key.is_open = True
    for name in names:
        state.install(Removable(name, removed))
    with pytest.raises(RuntimeError, match="stuck") if "stuck" in names else nullcontext():
        state.close()
    state.close()
    assert removed == names[::-1]
    assert not state.is_open
    assert state.model is None


@pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
def test_a_press_keeps_no_part_of_a_model_alive(package):
    press, model = package.SnapKVPress(0.5, window_size=4), build("llama", num_layers=2)
    held = [weakref.ref(module) for module in model.modules()]
    with press(model):
        model(torch.arange(3, 23)[None])
    del model
    gc.collect()
    assert not [module for ref in held if (module := ref()) is not None]
