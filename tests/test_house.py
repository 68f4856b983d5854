"""What stands in which room."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import yaml

import hooks_impl
import patch_impl

ROOT = Path(__file__).parent.parent
DEFAULTS = yaml.safe_load((ROOT / "tests" / "defaults.yaml").read_bytes())
"""What users rely on where they say nothing, by press; one that is being added has none yet."""


def calls_in(path):
    """Names of all functions and methods that a file, or the files of a folder, call."""
    names, place = set(), ROOT / path
    for path in [place] if place.is_file() else place.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                names.add(getattr(function, "attr", getattr(function, "id", "")))
    return names


def test_both_packages_hold_the_same_files():
    """But for what makes one of them a drop-in for kvpress."""
    hooks, patches = (
        {path.name for path in (ROOT / name).glob("*.py")} for name in ("hooks_impl", "patch_impl")
    )
    assert hooks - {"kvpress.py", "kvpress_views.py"} == patches


def test_patches_register_no_hooks():
    assert not {name for name in calls_in("patch_impl") if name.startswith("register_")}
    assert "register_forward_hook" in calls_in("hooks_impl")


def test_hooks_set_no_attributes():
    calls = calls_in("hooks_impl/mechanism.py") | calls_in("hooks_impl/presses.py")
    assert not calls & {"setattr", "wrap", "intercept", "__setattr__"}
    assert {"wrap", "intercept"} <= calls_in("patch_impl")


@pytest.mark.parametrize("name", ["hooks_impl", "patch_impl"])
def test_a_mechanism_stands_in_one_file_of_two_pages(name):
    assert len((ROOT / name / "mechanism.py").read_text().splitlines()) <= 225


def test_formulas_hold_no_module():
    for path in (ROOT / "press_core" / "presses").glob("*.py"):
        assert "nn.Module" not in path.read_text(), path.name


@pytest.mark.parametrize("name", sorted(hooks_impl.PRESSES | patch_impl.PRESSES))
def test_same_fields_and_defaults(name):
    def fields(package):
        return [(f.name, f.type, f.default) for f in dataclasses.fields(package.PRESSES[name])]

    own = fields(hooks_impl)
    told = {field: default for field, _, default in own if default is not dataclasses.MISSING}
    assert told == DEFAULTS.get(name, told)
    assert own == fields(patch_impl)
    assert inspect.getdoc(hooks_impl.PRESSES[name]) == inspect.getdoc(patch_impl.PRESSES[name])


def test_all_packages_are_typed():
    for name in ("press_core", "attention_patch", "hooks_impl", "patch_impl", "experiments"):
        assert (ROOT / name / "py.typed").exists()
