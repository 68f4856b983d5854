"""The study's folder: whose files it takes, what it reads of a manifest, and how it resumes."""

import json
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import experiments
from experiments import EXPERIMENTS, UserError
from experiments.cli import app
from experiments.framework.experiment import Experiment, Finding
from experiments.framework.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from experiments.framework.report import write_report
from experiments.framework.results import read_parts
from experiments.study import environment_info, run_study

runner = CliRunner()


@dataclass(frozen=True)
class Options:
    x: int = 1


class Counted(Experiment[Options]):
    """Writes one table of its name, and notes that it ran."""

    method = "A number is written down."

    def __init__(self, name, ran, x=1, interrupt=None):
        self.name, self.title, self.question = name, f"The {name}", f"What about {name}?"
        self.full = self.quick = Options(x)
        self.ran, self.interrupt = ran, interrupt

    def measure(self, options, progress):
        self.ran.append(self.name)
        if self.interrupt:
            raise self.interrupt
        return {self.name: pd.DataFrame({"x": [options.x]})}

    def findings(self, tables):
        return [Finding("x", f"It is **{tables[self.name]['x'][0]}**.")]


def run(chosen, folder, **kwargs):
    console = Console(file=StringIO(), width=200)
    failed = run_study(chosen, folder, console, **kwargs)
    return failed, console.file.getvalue()


def three(ran, interrupt=None, x=1):
    return [Counted("a", ran, x), Counted("b", ran, x, interrupt), Counted("c", ran, x)]


# ---- interrupts --------------------------------------------------------------------------------


def test_an_interrupted_study_goes_on_where_it_was(tmp_path):
    ran = []
    with pytest.raises(KeyboardInterrupt):
        run(three(ran, KeyboardInterrupt()), tmp_path)
    assert ran == ["a", "b"]
    assert read_manifest(tmp_path).waiting == ["b", "c"]
    before = (tmp_path / "a.csv").stat().st_mtime_ns
    failed, printed = run(three(ran), tmp_path)
    assert failed == []
    assert ran == ["a", "b", "b", "c"]
    assert (tmp_path / "a.csv").stat().st_mtime_ns == before
    assert "1 of 3 experiments were finished" in printed
    manifest = read_manifest(tmp_path)
    assert (list(manifest.experiments), manifest.waiting) == (["a", "b", "c"], [])
    assert "The a" in (tmp_path / "report.html").read_text()
    run(three(ran), tmp_path)  # it is finished: the same command measures anew
    assert ran[4:] == ["a", "b", "c"]


def test_what_was_asked_otherwise_is_run_again(tmp_path):
    ran = []
    with pytest.raises(KeyboardInterrupt):
        run(three(ran, KeyboardInterrupt()), tmp_path)
    run(three(ran, x=2), tmp_path)
    assert ran == ["a", "b", "a", "b", "c"]


def test_what_failed_before_the_interrupt_is_run_again(tmp_path):
    ran = []
    chosen = three(ran)
    chosen[0].interrupt, chosen[1].interrupt = RuntimeError("no"), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path)
    run(three(ran), tmp_path)
    assert ran == ["a", "b", "a", "b", "c"]


def test_an_interrupt_while_files_are_written_leaves_none_that_nobody_knows(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr("experiments.study.read_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(three(ran), tmp_path)
    assert (tmp_path / "a.csv").exists()
    monkeypatch.undo()
    (part,) = read_parts(tmp_path, three(ran))
    assert "interrupted" in part.error
    assert run(three(ran), tmp_path)[0] == []


def interrupted(*_):
    raise KeyboardInterrupt


def test_one_experiment_of_an_interrupted_study_leaves_the_others_waiting(tmp_path):
    ran = []
    with pytest.raises(KeyboardInterrupt):
        run(three(ran, KeyboardInterrupt()), tmp_path)
    run(three(ran), tmp_path, only=["c"])
    assert read_manifest(tmp_path).waiting == ["b"]
    run(three(ran), tmp_path)
    assert ran == ["a", "b", "c", "b"]


def test_the_command_says_how_to_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "experiments.study.load_experiments", lambda: three([], KeyboardInterrupt())
    )
    result = runner.invoke(app, ["study", "--output", str(tmp_path)])
    assert result.exit_code == 130
    assert "the same command goes on" in " ".join(result.stderr.split())
    shown = runner.invoke(app, ["report", "--input", str(tmp_path)])
    assert shown.exit_code == 2  # of the study's own experiments none is called a
    write_report(tmp_path, three([]))
    assert "The a" in (tmp_path / "report.html").read_text()


def test_a_study_can_add_an_experiment_that_its_folder_lacks(tmp_path):
    ran = []
    run(three(ran)[:1], tmp_path)
    run(three(ran), tmp_path, only=["c"])
    assert list(read_manifest(tmp_path).experiments) == ["a", "c"]


def test_the_committed_manifest_can_list_every_experiment(tmp_path):
    manifest = read_manifest(Path(experiments.__file__).parents[1] / "results")
    entries = {name: {"tables": [name], "figures": {name: "It."}} for name in EXPERIMENTS}
    write_manifest(
        Manifest.model_validate(manifest.model_dump() | {"experiments": entries}), tmp_path
    )
    assert list(read_manifest(tmp_path).experiments) == list(EXPERIMENTS)


# ---- files of others ---------------------------------------------------------------------------

FOREIGN = ["a.csv", "a_more.svg", "report.md", "report.html", "overview.svg"]


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_others_stop_a_study_before_it_works(tmp_path, name):
    (tmp_path / name).write_text("mine")
    ran = []
    with pytest.raises(UserError, match=f"{name} was not written by the study.*--output"):
        run(three(ran), tmp_path)
    assert ran == []
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}


def test_files_of_others_can_be_replaced_if_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.study.load_experiments", lambda: three([]))
    (tmp_path / "a.csv").write_text("mine")
    (tmp_path / MANIFEST).write_text("[]")
    args = ["study", "--output", str(tmp_path)]
    assert runner.invoke(app, args).exit_code == 2
    assert (tmp_path / "a.csv").read_text() == "mine"
    assert runner.invoke(app, [*args, "--overwrite"]).exit_code == 0
    assert (tmp_path / "a.csv").read_text() == "x\n1\n"


def test_a_file_that_appears_beside_a_study_is_not_the_studys(tmp_path):
    run(three([])[:1], tmp_path)
    (tmp_path / "c.csv").write_text("mine")
    with pytest.raises(UserError, match=r"c\.csv was not written"):
        run(three([]), tmp_path, only=["c"])
    run(three([])[:2], tmp_path)  # neither of which would write it
    assert (tmp_path / "c.csv").read_text() == "mine"


@pytest.mark.parametrize("name", ["a.csv", MANIFEST])
def test_nothing_is_written_through_a_link(tmp_path, name):
    folder, victim = tmp_path / "study", tmp_path / "victim"
    run(three([]), folder)
    victim.write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to(victim)
    before = victim.read_bytes()
    with pytest.raises(UserError, match="no plain file"):
        run(three([], x=5), folder)
    assert victim.read_bytes() == before


@pytest.mark.parametrize(
    "entry",
    [
        {"tables": ["../victim/data"]},
        {"tables": ["/etc/passwd"]},
        {"tables": ["a/../../victim"]},
        {"figures": {"../victim/data": "It."}},
        {"tables": ["notes"]},
        {"tables": [""]},
        {"tables": ["a\u0000"]},
        {"tables": ["a\n"]},
        {"tables": "a"},
        {"tables": [7]},
        {"figures": ["a"]},
        {"seconds": -1.0},
        {"seconds": "long"},
        {"error": 3},
        [],
        None,
    ],
)
def test_a_manifest_names_nothing_but_files_of_its_experiments(tmp_path, entry):
    folder, victim = tmp_path / "study", tmp_path / "victim"
    run(three([]), folder)
    victim.mkdir()
    for path in (victim / "data.csv", victim / "data.svg", folder / "notes.csv"):
        path.write_text("mine")
    content = json.loads((folder / MANIFEST).read_text())
    content["experiments"]["a"] = entry
    (folder / MANIFEST).write_text(json.dumps(content))
    ran = []
    with pytest.raises(UserError, match="is no manifest of a study") as refused:
        run(three(ran), folder)
    assert "\n" not in str(refused.value)
    assert ran == []
    for path in (victim / "data.csv", victim / "data.svg", folder / "notes.csv"):
        assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "content", ["{}", "[]", "", "null", "3", '"x"', "{", "\udcff", "[" * 100_000, "9" * 5000]
)
@pytest.mark.parametrize("command", [["study", "--output"], ["report", "--input"]])
def test_what_is_no_manifest_is_told_in_one_line(tmp_path, content, command):
    (tmp_path / MANIFEST).write_bytes(content.encode("utf-8", "surrogateescape"))
    result = runner.invoke(app, [*command, str(tmp_path)])
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith("error: ")
    assert str(tmp_path / MANIFEST) in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_a_folder_in_the_place_of_the_manifest_is_told_too(tmp_path):
    (tmp_path / MANIFEST).mkdir()
    for command in (["study", "--output"], ["report", "--input"]):
        result = runner.invoke(app, [*command, str(tmp_path)])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.exception


def test_a_table_that_is_gone_or_none_is_told_in_one_line(tmp_path):
    run(three([]), tmp_path)
    (tmp_path / "a.csv").write_bytes(b'"\xff')
    with pytest.raises(UserError, match=r"a\.csv is no table"):
        read_parts(tmp_path, three([]))
    (tmp_path / "a.csv").unlink()
    with pytest.raises(UserError, match=r"cannot read the table .*a\.csv"):
        read_parts(tmp_path, three([]))


@pytest.mark.parametrize("command", ["study", "trace"])
def test_the_folder_is_checked_before_the_work(monkeypatch, tmp_path, command):
    def work(*_):
        raise AssertionError("it worked")

    monkeypatch.setattr("experiments.study.measured", work)
    monkeypatch.setattr("experiments.framework.command.measured", work)
    (tmp_path / "file").write_text("mine")
    result = runner.invoke(app, [command, "--output", str(tmp_path / "file" / "folder")])
    assert result.exit_code == 2, result.exception
    assert "cannot write to the folder" in result.stderr
    assert result.stderr.count("\n") == 1


# ---- whatever a manifest holds -----------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(["a", "a_b", "../a", "a/../../victim", "run", "", "a\u0000", "b"])
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "tables": st.lists(st.just("a") | NAMES, max_size=2),
        "figures": st.dictionaries(st.just("a") | NAMES, st.text(max_size=5), max_size=2),
        "seconds": st.floats(0, 10),
        "error": st.none() | st.text(max_size=5),
    },
)
MANIFESTS = st.fixed_dictionaries(
    {name: st.just(value) for name, value in environment_info().items()}
    | {"experiments": st.dictionaries(st.just("a") | NAMES, ENTRIES, max_size=2)},
    optional={"waiting": st.lists(NAMES, max_size=2), "options": st.text(max_size=5)},
)
SPOILT = st.builds(
    lambda manifest, name, value: manifest | {name: value},
    MANIFESTS,
    st.sampled_from(list(Manifest.model_fields)),
    VALUES,
)


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=200)
    | (VALUES | MANIFESTS | SPOILT).map(lambda value: json.dumps(value).encode("utf-8"))
)
def test_whatever_a_manifest_holds_is_read_or_refused_and_nothing_is_lost(content):
    with TemporaryDirectory() as place:
        folder, victim = Path(place) / "study", Path(place) / "victim.csv"
        folder.mkdir()
        for path in (victim, folder / "notes.csv"):
            path.write_text("mine")
        (folder / MANIFEST).write_bytes(content)
        try:
            run([Counted("a", [])], folder)
        except UserError:
            assert {path.name for path in folder.iterdir()} == {MANIFEST, "notes.csv"}
            assert (folder / MANIFEST).read_bytes() == content
        else:
            assert list(read_manifest(folder).experiments) == ["a"]
        assert {victim.read_text(), (folder / "notes.csv").read_text()} == {"mine"}


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    run(three([]), tmp_path)
    manifest = read_manifest(tmp_path)
    write_manifest(manifest, tmp_path)
    assert read_manifest(tmp_path) == manifest
