"""The tables of the README and of docs/, from a study's folder."""

from unittest.mock import patch

import pytest

from experiments import UserError
from experiments.framework.readme import blocks, fill
from tests.experiments.tiny import BROKEN, CASES, ONE, TWO, cli, note, refused, study, succeeded

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
    assert set(contents) == {"answers", "one", "one-mean", "two", "two-mean"}
    assert contents["one"].endswith("Nothing else.")
    answers, filled = contents["answers"], fill(README, contents)
    assert answers.startswith(f"## [{ONE.title}](")
    assert "\n\n- The mean of one is **1.867**.\n" in answers
    assert f"](../{finished.name}/one.svg)" in answers
    assert f"](../{finished.name}/report.html#two)" in answers
    assert filled == (
        f"# Title\n\n<!-- table: answers -->\n\n{answers}\n\n<!-- /table -->\n\nBetween.\n\n"
        "<!-- table: two-mean one-mean -->\n\n- The mean of two is **1.867**.\n"
        "- The mean of one is **1.867**.\n\n<!-- /table -->\nEnd.\n"
    )
    assert fill(filled, contents) == filled


@pytest.fixture
def site(registered, folder, monkeypatch):
    """A README and a page beside a study of `ONE` and `TWO`."""
    registered(ONE, TWO)
    root = folder.parent
    (root / "docs" / "deep").mkdir(parents=True)
    for page in ("README.md", "docs/deep/one.md"):
        (root / page).write_text(README)
    (root / "docs" / "plain.md").write_text("# Title\n")
    monkeypatch.chdir(root)
    return root


def test_readme_command(site):
    readme, page = site / "README.md", site / "docs" / "deep" / "one.md"
    assert "README.md does not show" in cli("readme", "--check", status=1).stderr
    with patch("pathlib.Path.write_bytes", side_effect=OSError(28, "No space left")):
        assert "README.md: No space left" in refused("readme")
    assert readme.read_text() == README
    succeeded("readme")
    fresh = readme.read_text()
    assert page.read_text() == fresh != README
    assert (site / "docs" / "plain.md").read_text() == "# Title\n"
    succeeded("readme", "--check")

    page.write_text(fresh.replace("- The mean of two is **1.867**.\n- ", "- ... **1.868**.\n- "))
    stale = cli("readme", "--check", status=1).stderr
    assert stale.startswith("docs/deep/one.md does not show what results holds\n")


@pytest.mark.parametrize(("changed", "words"), CASES["mixed"])
@pytest.mark.usefixtures("site")
def test_results_of_more_than_one_run_fail_the_check(folder, changed, words):
    note(folder, "two", **changed)
    assert words in refused("readme", "--check")


@pytest.mark.parametrize(("text", "words"), CASES["markers"])
def test_wrong_markers_are_refused(finished, text, words):
    with pytest.raises(UserError, match=words):
        fill(text, blocks(finished, [ONE, TWO]))


def test_a_failed_study_fills_no_readme(tmp_path):
    study([ONE, BROKEN], tmp_path)
    with pytest.raises(UserError, match="broken failed in the study"):
        blocks(tmp_path, [ONE, BROKEN])
