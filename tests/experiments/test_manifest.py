"""The study's folder: whose files it takes, what it reads of a manifest, and how it resumes."""

import json
from unittest.mock import patch

import pandas as pd
import pytest

from experiments import UserError
from experiments.framework.manifest import MANIFEST, read_manifest
from experiments.framework.report import write_report
from experiments.framework.results import read_parts
from tests.experiments.tiny import CASES, Options, cli, refused, study, tiny


def counted(name, ran, x, error=None):
    """Writes one table of its name, and notes that it ran."""

    def measure(options, progress):
        ran.append(name)
        if error:
            raise error
        return {name: pd.DataFrame({"x": [options.last]})}

    return tiny(name, measure=measure, full=Options(x), figures=lambda tables: {})


def three(ran, error=None, x=1, first=None):
    return [counted("a", ran, x, first), counted("b", ran, x, error), counted("c", ran, x)]


def interrupted(folder, ran, **changed):
    with pytest.raises(KeyboardInterrupt):
        study(three(ran, KeyboardInterrupt(), **changed), folder)


@pytest.fixture
def ran():
    """The experiments that were run."""
    return []


# ---- interrupts --------------------------------------------------------------------------------


def test_an_interrupted_study_goes_on_where_it_was(tmp_path, ran):
    interrupted(tmp_path, ran)
    assert ran == ["a", "b"]
    assert read_manifest(tmp_path).waiting == ["b", "c"]
    before = (tmp_path / "a.csv").stat().st_mtime_ns
    failed, printed = study(three(ran), tmp_path)
    assert failed == []
    assert ran == ["a", "b", "b", "c"]
    assert (tmp_path / "a.csv").stat().st_mtime_ns == before
    assert "1 of 3 experiments" in printed
    manifest = read_manifest(tmp_path)
    assert (list(manifest.experiments), manifest.waiting) == (["a", "b", "c"], [])
    assert "The a" in (tmp_path / "report.html").read_text()
    study(three(ran), tmp_path)  # it is finished: the same command measures anew
    assert ran[4:] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"x": 2}), ({"first": RuntimeError("no")}, {})],
    ids=["asked otherwise", "failed"],
)
def test_what_is_not_what_was_asked_is_run_again(tmp_path, before, after, ran):
    interrupted(tmp_path, ran, **before)
    study(three(ran, **after), tmp_path)
    assert ran == ["a", "b", "a", "b", "c"]


def test_nothing_is_run_again_because_its_report_was_not_written(tmp_path, ran):
    study(three(ran), tmp_path)
    with patch("experiments.study.write_report", side_effect=UserError), pytest.raises(UserError):
        study(three(ran), tmp_path)
    study(three(ran), tmp_path)
    assert ran == ["a", "b", "c"] * 2
    (tmp_path / "report.html").unlink()
    (tmp_path / "a.csv").write_text("x\n")  # which no report can be made of
    study(three(ran), tmp_path)
    assert ran == ["a", "b", "c"] * 3


def test_an_interrupt_while_files_are_written_leaves_none_that_nobody_knows(tmp_path):
    with patch("experiments.study.read_table", side_effect=KeyboardInterrupt):
        interrupted(tmp_path, [])
    assert (tmp_path / "a.csv").exists()
    assert read_manifest(tmp_path).waiting == ["a", "b", "c"]
    (part,) = read_parts(tmp_path, three([]))
    assert "interrupted" in part.error
    assert study(three([]), tmp_path)[0] == []


def test_a_second_study_in_a_folder_stops_the_first_and_leaves_the_others_waiting(tmp_path, ran):
    meanwhile = tiny("a", measure=lambda *_: study(three(ran), tmp_path, only=["c"]))
    with pytest.raises(UserError, match=f"another study .*{tmp_path}"):
        study([meanwhile, *three(ran)[1:]], tmp_path)
    assert read_manifest(tmp_path).waiting == ["a", "b"]
    study(three(ran), tmp_path)
    assert ran == ["c", "a", "b"]


def test_the_command_says_how_to_go_on(monkeypatch, tmp_path):
    chosen = three([], KeyboardInterrupt())
    monkeypatch.setattr("experiments.study.load_experiments", lambda: chosen)
    told = cli("study", "--output", tmp_path, status=130).stderr
    assert "the same command continues" in " ".join(told.split())
    write_report(tmp_path, chosen)
    assert "The a" in (tmp_path / "report.html").read_text()


# ---- files of others ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a.csv", "a_more.svg", "report.md", "report.html", "overview.svg"]
)
def test_files_of_others_stop_a_study_before_it_works(tmp_path, name, ran):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"{name} .*--output"):
        study(three(ran), tmp_path)
    assert ran == []
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}


def test_files_of_others_can_be_replaced_if_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.study.load_experiments", lambda: three([]))
    (tmp_path / "a.csv").write_text("mine")
    (tmp_path / MANIFEST).write_text("[]")
    args = ["study", "--output", str(tmp_path)]
    cli(*args, status=2)
    assert (tmp_path / "a.csv").read_text() == "mine"
    cli(*args, "--overwrite", status=0)
    assert (tmp_path / "a.csv").read_text() == "x\n2.9\n"


def test_a_file_that_appears_beside_a_study_is_not_the_studys(tmp_path):
    study(three([])[:1], tmp_path)
    (tmp_path / "c.csv").write_text("mine")
    with pytest.raises(UserError, match=r"c\.csv "):
        study(three([]), tmp_path, only=["c"])
    study(three([])[:2], tmp_path)  # neither of which would write it
    assert (tmp_path / "c.csv").read_text() == "mine"


@pytest.mark.parametrize("name", ["a.csv", MANIFEST])
def test_nothing_is_written_through_a_link(tmp_path, name):
    folder, victim = tmp_path / "study", tmp_path / "victim"
    study(three([]), folder)
    victim.write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to(victim)
    before = victim.read_bytes()
    with pytest.raises(UserError, match="no plain file"):
        study(three([], x=5), folder)
    assert victim.read_bytes() == before


@pytest.mark.parametrize("entry", CASES["entries"])
def test_a_manifest_names_nothing_but_files_of_its_experiments(tmp_path, entry, ran):
    folder, victim = tmp_path / "study", tmp_path / "victim"
    study(three([]), folder)
    victim.mkdir()
    others = (victim / "data.csv", victim / "data.svg", folder / "notes.csv")
    for path in others:
        path.write_text("mine")
    content = json.loads((folder / MANIFEST).read_text())
    content["experiments"]["a"] = entry
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError, match="manifest") as refused:
        study(three(ran), folder)
    assert "\n" not in str(refused.value)
    assert ran == []
    assert {path.read_text() for path in others} == {"mine"}


@pytest.mark.parametrize(
    "content", ["{}", "[]", "", '"x"', "{", "\udcff", "[" * 100_000, "9" * 5000, None]
)
@pytest.mark.parametrize("command", [["study", "--output"], ["report", "--input"]])
def test_what_is_no_manifest_is_told_in_one_line(tmp_path, content, command):
    if content is None:
        (tmp_path / MANIFEST).mkdir()
    else:
        (tmp_path / MANIFEST).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert str(tmp_path / MANIFEST) in refused(*command, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_a_table_that_is_gone_or_none_is_told_in_one_line(tmp_path):
    study(three([]), tmp_path)
    cases = {
        b'"\xff': r"cannot read .*a\.csv",
        b"x\n": r"a\.csv: it has no rows; run",
        b"x\nb\n": "lacks .* of 'a'",
    }
    for content, words in cases.items():
        (tmp_path / "a.csv").write_bytes(content)
        with pytest.raises(UserError, match=words):
            read_parts(tmp_path, three([]))
    (tmp_path / "a.csv").unlink()
    with pytest.raises(UserError, match=r"cannot read .*a\.csv"):
        read_parts(tmp_path, three([]))


@pytest.mark.parametrize("command", ["study", "trace", "evaluate", "train facts"])
def test_the_folder_is_checked_before_the_work(monkeypatch, tmp_path, command):
    of_command = "framework.command.measured", "testbed.training.facts.train", "answers.sweep.sweep"
    for name in ("study.measured", *of_command):
        monkeypatch.setattr(f"experiments.{name}", lambda *_: pytest.fail("it worked"))
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" / "folder"
    assert "cannot write to the folder" in refused(*command.split(), "--output", folder)
