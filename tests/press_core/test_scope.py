"""An open scope holds what a run learns and measures, and lets go of it when it closes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from patch_impl import KnormPress, SnapKVPress
from press_core import ScopeError, UnsupportedModelError, attention_sites
from press_core.scope import ScopeState, bind
from tests.support import build


@dataclass
class Notes:
    """What a press may learn in a run."""

    heard: list[str] = field(default_factory=list)


@dataclass
class OtherNotes(Notes):
    pass


class Removable:
    def __init__(self, name: str, removed: list[str]) -> None:
        self.name, self.removed = name, removed

    def remove(self) -> None:
        self.removed.append(self.name)


def state() -> ScopeState:
    return bind(KnormPress(0.5), build("llama", num_layers=2))


def test_binding_installs_nothing_and_knows_the_model() -> None:
    model: Any = build("llama", num_layers=2)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    bound: Any = bind(KnormPress(0.5), model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert bound.model is model
    assert bound.decoder is model.model
    assert [site.module for site in bound.sites] == [site.module for site in attention_sites(model)]
    assert bound.is_open


def test_a_press_that_does_not_fit_is_not_bound() -> None:
    with pytest.raises(UnsupportedModelError):
        bind(SnapKVPress(0.5), torch.nn.Linear(2, 2))


def test_memory_is_one_object_of_each_class_in_each_scope() -> None:
    one, two = state(), state()
    one.memory(Notes).heard.append("a word")
    assert one.memory(Notes).heard == ["a word"]
    assert one.memory(OtherNotes).heard == []
    assert two.memory(Notes).heard == []


def test_closing_forgets_what_was_learned_and_lets_go_of_the_model() -> None:
    bound = state()
    notes, model = weakref.ref(bound.memory(Notes)), bound.model
    bound.close()
    assert notes() is None
    assert bound.model is None
    assert bound.decoder is None
    assert model is not None
    assert not bound.is_open


def test_what_was_measured_can_be_read_after_closing() -> None:
    bound = state()
    bound.record(0, seen=10, kept=4)
    bound.record(0, seen=12, kept=6)
    bound.record(1, seen=12, kept=12)
    bound.close()
    assert bound.compression_count == 2
    assert bound.compression_ratio == pytest.approx(6 / 24)


def test_a_layer_that_was_never_pruned_counts_as_whole() -> None:
    bound = state()
    assert (bound.compression_ratio, bound.compression_count) == (0, 0)
    bound.record(1, seen=10, kept=4)
    assert bound.compression_ratio == pytest.approx(6 / 20)


def test_what_was_installed_comes_off_once_the_last_first() -> None:
    bound, removed = state(), list[str]()
    for name in "abc":
        bound.install(Removable(name, removed))
    bound.close()
    bound.close()
    assert removed == ["c", "b", "a"]


def test_all_comes_off_though_one_part_cannot() -> None:
    class Stuck(Removable):
        def remove(self) -> None:
            raise RuntimeError(self.name)

    bound, removed = state(), list[str]()
    for part in (Removable("a", removed), Stuck("b", removed), Removable("c", removed)):
        bound.install(part)
    with pytest.raises(RuntimeError, match="b"):
        bound.close()
    assert removed == ["c", "a"]
    assert not bound.is_open


def test_of_several_warnings_the_first_is_given_once() -> None:
    bound = state()
    bound.warnings += [lambda: None, lambda: ": one", lambda: ": two"]
    with pytest.warns(RuntimeWarning) as given:
        bound.close()
    assert [str(warning.message) for warning in given] == ["KnormPress: one"]
    bound.close()
    assert len(given) == 1


def test_each_scope_has_a_key_of_its_own() -> None:
    assert len({state().key for _ in range(3)}) == 3


def test_a_scope_opens_again_once_it_is_closed_and_measures_anew() -> None:
    scope: Any = KnormPress(0.5)(build("llama", num_layers=2))
    with scope:
        first = scope.state
        first.record(0, seen=10, kept=4)
        with pytest.raises(ScopeError, match="open already"):
            scope.open()
        assert scope.state is first
    with scope:
        assert scope.state is not first
        assert scope.press.compression_count == 0
    scope.remove()
    assert not first.is_open


def test_a_press_keeps_no_part_of_a_model_alive() -> None:
    press, model = KnormPress(0.5), build("llama", num_layers=2)
    held = [weakref.ref(module) for module in model.modules()]
    press.register(model).remove()
    del model
    gc.collect()
    assert not [module for ref in held if (module := ref()) is not None]
    assert press.last_scope is not None
