"""An open scope holds what a run measures, and lets go of the model when it closes."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import hooks_impl
import patch_impl
from patch_impl import KnormPress
from press_core import ScopeError, attention_sites
from press_core.scope import ScopeState, bound_to
from press_core.tally import Tally
from tests.support import build


@pytest.fixture
def state() -> ScopeState:
    """Open, with nothing installed."""
    state = bound_to(KnormPress(0.5), build("llama", num_layers=2))
    state.key.is_open = True
    return state


class Removable:
    def __init__(self, name: str, removed: list[str]) -> None:
        self.name, self.removed = name, removed

    def remove(self) -> None:
        self.removed.append(self.name)
        if self.name == "stuck":
            raise RuntimeError(self.name)


def test_binding_installs_nothing_and_knows_the_model() -> None:
    model: Any = build("llama", num_layers=2)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    bound = bound_to(KnormPress(0.5), model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert bound.model is model
    assert bound.decoder is model.model
    assert [site.module for site in bound.sites] == [site.module for site in attention_sites(model)]
    assert not bound.is_open


def test_ratios_and_counts_are_those_of_the_last_pruning_of_each_layer() -> None:
    tally = Tally(n_sites=2)
    assert (tally.compression_ratio, tally.compression_count) == (0, 0)
    tally.record(0, seen=10, kept=4)  # the other layer was never pruned, and counts as whole
    assert tally.compression_ratio == pytest.approx(6 / 20)
    tally.record(0, seen=12, kept=6)
    tally.record(1, seen=20, kept=12)  # layers are of the same context, and the longest tells
    assert (tally.compression_ratio, tally.compression_count) == (pytest.approx(14 / 40), 2)


@pytest.mark.parametrize("names", [["a", "b", "c"], ["a", "stuck", "c"]])
def test_what_was_installed_comes_off_once_the_last_first(
    state: ScopeState, names: list[str]
) -> None:
    """Also if one part cannot."""
    removed = list[str]()
    for name in names:
        state.install(Removable(name, removed))
    with pytest.raises(RuntimeError, match="stuck") if "stuck" in names else nullcontext():
        state.close()
    state.close()
    assert removed == names[::-1]
    assert not state.is_open
    assert state.model is None


def test_a_scope_opens_again_once_it_is_closed_and_measures_anew() -> None:
    scope: Any = KnormPress(0.5)(build("llama", num_layers=2))
    with scope:
        first = scope.state
        first.tally.record(0, seen=10, kept=4)
        with pytest.raises(ScopeError, match="open already"):
            scope.open()
        assert scope.state is first
    assert scope.press.compression_count == 1  # can be read after closing
    with scope:
        assert scope.state is not first
        assert scope.state.key is not first.key
        assert scope.press.compression_count == 0
    assert not first.is_open


@pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
@torch.no_grad()
def test_a_press_keeps_no_part_of_a_model_alive(package: Any) -> None:
    press, model = package.SnapKVPress(0.5, window_size=4), build("llama", num_layers=2)
    held = [weakref.ref(module) for module in model.modules()]
    with press(model):
        model(torch.arange(3, 23)[None])
    del model
    gc.collect()
    assert not [module for ref in held if (module := ref()) is not None]
