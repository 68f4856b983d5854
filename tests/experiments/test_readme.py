"""The tables of the README and of docs/, from a study's folder."""

import json

import pytest
from typer.testing import CliRunner

from experiments import UserError
from experiments.cli import app
from experiments.framework.manifest import MANIFEST
from experiments.framework.readme import blocks, fill
from tests.experiments.tiny import BROKEN, ONE, TWO, note, study

runner = CliRunner()

README = """# Title

<!-- table: answers -->
<!-- /table -->

Between.

<!-- table: two-mean one-mean -->
old
<!-- /table -->
End.
"""


def test_blocks_are_filled_once(finished):
    contents = blocks(finished, [ONE, TWO])
    assert set(contents) == {"answers", "one-mean", "two-mean"}
    filled, stale = fill(README, contents)
    assert stale == ["answers", "two-mean", "one-mean"]
    answers = contents["answers"]
    assert answers.startswith(f"## {ONE.title}\n\n- The mean of one is **1.867**.\n")
    assert f"](../{finished.name}/one.svg)" in answers
    assert f"](../{finished.name}/report.html#two)" in answers
    assert filled == (
        f"# Title\n\n<!-- table: answers -->\n\n{answers}\n\n<!-- /table -->\n\nBetween.\n\n"
        "<!-- table: two-mean one-mean -->\n\n- The mean of two is **1.867**.\n"
        "- The mean of one is **1.867**.\n\n<!-- /table -->\nEnd.\n"
    )
    assert fill(filled, contents) == (filled, [])


def test_readme_command(registered, folder, tmp_path, monkeypatch):
    registered(ONE, TWO)
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    pages = [tmp_path / "README.md", tmp_path / "docs" / "deep" / "one.md"]
    plain, citation = tmp_path / "docs" / "plain.md", tmp_path / "CITATION.cff"
    for page in pages:
        page.write_text(README)
    plain.write_text("# Title\n")
    released = "commit: kept\nreferences:\n  - type: data\n    date-released: "
    citation.write_text(f"{released}2001-01-01\n")
    monkeypatch.chdir(tmp_path)

    stale = runner.invoke(app, ["readme", "--check"])
    assert stale.exit_code == 1
    assert "answers, two-mean, one-mean" in stale.stderr
    assert pages[0].read_text() == README
    assert runner.invoke(app, ["readme"]).exit_code == 0
    date = json.loads((folder / MANIFEST).read_text())["date"][:10]
    assert citation.read_text() == f"{released}{date}\n"
    fresh = pages[0].read_text()
    assert pages[1].read_text() == fresh != README
    assert plain.read_text() == "# Title\n"
    assert runner.invoke(app, ["readme", "--check"]).exit_code == 0
    assert runner.invoke(app, ["readme"]).exit_code == 0
    assert pages[0].read_text() == fresh

    pages[1].write_text(
        fresh.replace("- The mean of two is **1.867**.\n- ", "- ... **1.868**.\n- ")
    )
    stale = runner.invoke(app, ["readme", "--check"])
    assert stale.exit_code == 1
    assert "deep/one.md does not show what results holds: two-mean, one-mean\n" in stale.stderr
    assert "README.md does not" not in stale.stderr


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"commit": "1" * 40}, "two ran at 1111"),
        ({"versions": {"torch": "1.0"}}, "two ran with other versions"),
        ({"options": "Options(last=9)"}, "two ran with other options"),
        ({"note": "by hand"}, "two has a note"),
        ({"figures": {}}, "two.svg belongs to no experiment"),
    ],
)
def test_results_of_more_than_one_run_fail_the_check(registered, folder, changed, words):
    registered(ONE, TWO)
    page = folder.parent / "README.md"
    page.write_text(README)
    options = ["readme", "--page", str(page), "--results", str(folder)]
    assert runner.invoke(app, options).exit_code == 0
    note(folder, "two", **changed)
    result = runner.invoke(app, [*options, "--check"])
    assert result.exit_code == 2
    assert words in result.stderr


def test_pages_that_are_missing_or_have_no_tables(tmp_path):
    path = tmp_path / "README.md"
    result = runner.invoke(app, ["readme", "--page", str(path)])
    assert result.exit_code == 2
    assert "README.md" in result.stderr
    path.write_text("# Title\n")
    result = runner.invoke(app, ["readme", "--page", str(path), "--results", "nowhere", "--check"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- table: three -->\n<!-- /table -->", "no table is called 'three'; there are answers"),
        ("\n<!-- table: one-mean -->\n", "line 2: the block opened here lacks its"),
        ("<!-- /table -->", "line 1: <!-- /table --> closes a block that nothing opens"),
        (
            "<!-- table: one-mean -->\n<!-- table: two-mean -->\n<!-- /table -->",
            "line 2: <!-- table: two-mean --> inside the block that line 1 opens",
        ),
    ],
)
def test_wrong_markers_are_refused(finished, text, words):
    with pytest.raises(UserError) as refused:
        fill(text, blocks(finished, [ONE, TWO]))
    assert words in str(refused.value)


def test_a_failed_study_fills_no_readme(tmp_path):
    study([ONE, BROKEN], tmp_path)
    with pytest.raises(UserError, match="broken failed in the study"):
        blocks(tmp_path, [ONE, BROKEN])
