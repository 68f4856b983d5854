"""What the documentation tells its readers to do works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("press_core", "attention_patch", "hooks_impl", "patch_impl", "experiments", "tests")
FREE_TESTS = ("house", "scopes", "generation", "bad_input", "hooks_equal_patches")
_BLOCK = re.compile(r'```(\w*)(?: title="(.*?)")?\n(.*?)```', re.DOTALL)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Language, title and text of the code blocks of a page, or of the README."""
    return _BLOCK.findall((ROOT / "docs" / page).resolve().read_text())


@pytest.fixture
def checkout(tmp_path):
    """A copy of the project that a test may change."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "stdlib-neox")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def declare(path: Path, text: str) -> None:
    """Add an import and a class to the list of presses of a package."""
    imported, declared = text.split("\n\n\n")
    listed = path.read_text().replace("\n\nPRESSES:", f"\n\n{declared}\n\nPRESSES:")
    path.write_text(listed.replace("\nfrom press_core", f"\n{imported}\nfrom press_core", 1))


def run(checkout: Path, *arguments: str) -> str:
    environment = os.environ | {"HYPOTHESIS_PROFILE": "short", "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_adding_a_press(checkout):
    for _, title, text in blocks("adding-a-press.md"):
        path = checkout / title
        if path.name == "presses.py":
            declare(path, text)
        elif title:
            path.write_text(text)
    free = [f"tests/test_{name}.py" for name in FREE_TESTS]
    found = run(
        checkout, "-m", "pytest", "-q", "-rA", "-p", "no:xdist", "-k", "ValueNormPress", *free
    )
    for name in FREE_TESTS:
        assert f"PASSED tests/test_{name}.py" in found
    run(checkout, "-m", "pytest", "-q", "-p", "no:xdist", "tests/press_core/test_value_norm.py")
    commands = [text for language, _, text in blocks("adding-a-press.md") if language == "bash"]
    equivalence = next(text for text in commands if "--family" in text)
    assert "equal" in run(checkout, *equivalence.split()[1:])


PAGES = ("../README", "index", "mechanisms", "headwise", "auditing", "evaluation", "migration")


@pytest.mark.parametrize("page", PAGES)
def test_pages_print_what_they_say(page, tmp_path):
    """The code of a page, from top to bottom; a block without a language is what it prints."""
    code, expected, previous = [], "", ""
    for language, title, text in blocks(f"{page}.md"):
        if title:
            (tmp_path / title).write_text(text)
        elif language == "python":
            code.append(text)
        elif not language and previous == "python":
            expected += text
        previous = "" if title else language
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for line in expected.splitlines():
        assert line in done.stdout.splitlines()


def test_a_press_of_ones_own_is_searched_for_counterexamples(tmp_path):
    for _, title, text in blocks("auditing.md"):
        if title:
            (tmp_path / title).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "test_my_presses.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
