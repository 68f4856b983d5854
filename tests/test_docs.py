"""What the documentation tells its readers to do works."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hooks_impl
from tests.experiments.tiny import succeeded
from tests.presses import TABLES
from tests.support import PLAIN

ROOT = Path(__file__).parent.parent
FOLDERS = ("press_core", "attention_patch", "hooks_impl", "patch_impl", "experiments", "tests")
FREE_TESTS = ("house", "scopes", "generation", "bad_input", "hooks_equal_patches")
_BLOCK = re.compile(r'```(\w*)(?: title="(.*?)")?\n(.*?)```', re.DOTALL)


def blocks(page):
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


def declare(path, text):
    """Add an import and a class to the list of presses of a package."""
    imported, declared = text.split("\n\n\n")
    listed = path.read_text().replace("\n\nPRESSES:", f"\n\n{declared}\n\nPRESSES:")
    path.write_text(listed.replace("\nfrom press_core", f"\n{imported}\nfrom press_core", 1))


IN_THE_CHECKOUT = """
import json, sys, pytest
from experiments.cli import app
failed = pytest.main(json.loads(sys.argv.pop(1)))
sys.exit(failed or app())
"""


def test_adding_a_press(checkout):
    for _, title, text in blocks("adding-a-press.md"):
        path = checkout / title
        if path.name == "presses.py":
            declare(path, text)
        elif title:
            path.write_text(text)
    free = [f"tests/test_{name}.py" for name in FREE_TESTS]
    own = "tests/press_core/test_value_norm.py"
    chosen = ["-k", "ValueNormPress or test_value_norm", *free, own]
    commands = [text for language, _, text in blocks("adding-a-press.md") if language == "bash"]
    equivalence = next(text for text in commands if "--family" in text)
    arguments = [json.dumps(["-q", "-rA", "-p", "no:xdist", *chosen]), *equivalence.split()[3:]]
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_CHECKOUT, *arguments],
        cwd=checkout,
        env=PLAIN | {"HYPOTHESIS_PROFILE": "short", "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for path in (*free, own):
        assert f"PASSED {path}" in done.stdout
    assert "equal" in done.stdout.rpartition(" passed")[2]


@pytest.mark.parametrize("page", TABLES["pages"])
def test_pages_print_what_they_say(page, tmp_path, monkeypatch, capsys):
    """The code of a page, from top to bottom; a block without a language is what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code, expected, printed, previous = [], [], [], ("", "")
    for language, title, text in blocks(f"{page}.md"):
        if title:
            (tmp_path / title).write_text(text)
        elif language == "python":
            code.append(text)
        elif not language and previous[0] == "python":
            expected += text.splitlines()
        elif not language and previous[1].startswith("python "):
            command = shlex.split(previous[1].replace("\\\n", ""))
            assert command[:3] == ["python", "-m", "experiments"]
            printed += succeeded(*command[3:], width=100).output.splitlines()
            expected += text.splitlines()
        previous = language, text
    (tmp_path / "page.py").write_text("\n".join(code))
    known = set(sys.modules)
    try:
        with torch.enable_grad():  # puts back what a page may switch off
            runpy.run_path("page.py", run_name="__main__")
    finally:
        for name in {path.stem for path in tmp_path.glob("*.py")} - known:
            sys.modules.pop(name, None)  # another page may have a module of this name
    printed += capsys.readouterr().out.splitlines()
    assert [line for line in expected if line.strip() not in map(str.strip, printed)] == []


def test_all_presses_are_listed():
    listed = set(re.findall(r"`(\w+Press)`", (ROOT / "docs" / "presses.md").read_text()))
    assert listed == set(hooks_impl.PRESSES)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_a_press_of_ones_own_is_searched_for_counterexamples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    titled = {title: text for _, title, text in blocks("auditing.md") if title}
    for title, text in titled.items():
        Path(title).write_text(text)
    try:
        runpy.run_path("test_my_presses.py")["test_both_leave_the_same_bits"]()
    finally:
        sys.modules.pop("my_presses", None)
