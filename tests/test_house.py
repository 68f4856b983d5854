"""What stands in which room."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

import hooks_impl
import patch_impl

ROOT = Path(__file__).parent.parent


def calls_in(folder: str) -> set[str]:
    """Names of all functions and methods that the files of a folder call."""
    names = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                names.add(getattr(function, "attr", getattr(function, "id", "")))
    return names


def test_both_packages_hold_the_same_files():
    files = [{path.name for path in (ROOT / name).glob("*.py")} for name in PACKAGES]
    assert files[0] == files[1]


PACKAGES = ("hooks_impl", "patch_impl")


def test_patches_register_no_hooks():
    assert not {name for name in calls_in("patch_impl") if name.startswith("register_")}
    assert "register_forward_hook" in calls_in("hooks_impl")


def test_hooks_set_no_attributes():
    assert not calls_in("hooks_impl") & {"setattr", "wrap", "intercept", "__setattr__"}
    assert {"wrap", "intercept"} <= calls_in("patch_impl")


def test_formulas_hold_no_module():
    for path in (ROOT / "press_core" / "methods").glob("*.py"):
        assert "nn.Module" not in path.read_text(), path.name


def test_same_presses():
    assert hooks_impl.PRESSES.keys() == patch_impl.PRESSES.keys()
    assert len(hooks_impl.PRESSES) >= 9


@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES))
def test_same_fields_and_defaults(name):
    def fields(package):
        return [(f.name, f.type, f.default) for f in dataclasses.fields(package.PRESSES[name])]

    assert fields(hooks_impl) == fields(patch_impl)
    assert fields(hooks_impl)[0][0] == "compression_ratio"
    assert inspect.getdoc(hooks_impl.PRESSES[name]) == inspect.getdoc(patch_impl.PRESSES[name])


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("RandomPress", {"seed": None}),
        ("KnormPress", {}),
        ("StreamingLLMPress", {"n_sink": 4}),
        ("SnapKVPress", {"window_size": 64, "kernel_size": 5}),
        ("TOVAPress", {}),
        ("ObservedAttentionPress", {}),
        (
            "ExpectedAttentionPress",
            {
                "n_future_positions": 512,
                "n_sink": 4,
                "use_covariance": True,
                "use_vnorm": True,
                "epsilon": 0.0,
            },
        ),
        ("KeyDiffPress", {}),
        ("LagKVPress", {"n_sink": 4, "lag_size": 128, "cross_scoring": False}),
    ],
)
def test_defaults_are_those_of_kvpress(name, defaults):
    press = hooks_impl.PRESSES[name]()
    assert dataclasses.asdict(press) == {"compression_ratio": 0.0, **defaults}


def test_all_packages_are_typed():
    for name in ("press_core", "attention_patch", "hooks_impl", "patch_impl", "experiments"):
        assert (ROOT / name / "py.typed").exists()
