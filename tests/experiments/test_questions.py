"""Commands of the study: what they show they have written, and what is wrong they say."""

import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.progress import Progress

from experiments.framework.results import read_table
from experiments.testbed.facts import KEYS
from tests.experiments.tiny import CASES, cli, saved
from tests.support import table_beside


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model in the words of the facts task, and a text of 500 of them."""
    folder = saved(tmp_path_factory.mktemp("models") / "tiny", "gpt_neox")
    (folder / "broken.py").write_text("class Press(")
    (folder / "text.txt").write_text(" ".join(KEYS[:50] * 10), encoding="utf-8")
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("torch.compile", lambda model, **_: model)  # which takes a minute
    # Sweeps with the oldest transformers run with these, in a process of their own all the same.
    monkeypatch.setattr("experiments.questions.architectures.OLDEST", Path(sys.executable))

    def invoke(name, options, *more, status):
        given = f"{SMALL.get(name, '')} {options}".replace("{own}", OWN)
        words = [word.replace("TINY", str(folder)) for word in given.split()]
        return cli(name, *words, *more, status=status)

    return invoke


OWN = "tests.experiments.test_equivalence"
"""Where presses of a user's own are."""

SMALL = CASES["small"]
WRONG = table_beside(__file__, "wrong_commands")
RUNS = table_beside(__file__, "commands")


@pytest.mark.parametrize(("name", "options", "rows"), RUNS)
def test_a_command_writes_what_it_shows(run, tmp_path, name, options, rows):
    with patch.object(Progress, "add_task", autospec=True, side_effect=Progress.add_task) as bars:
        result = run(name, options, "--output", tmp_path, status=0)
    assert bars.called
    experiment = import_module(f"experiments.questions.{name}").EXPERIMENT
    tables = {path.stem: read_table(path) for path in tmp_path.glob("*.csv")}
    shown = " ".join(result.output.split())
    assert sum(map(len, tables.values())) == rows
    for finding in experiment.findings(tables):
        assert finding.text.replace("**", "") in shown
    for view in experiment.views(tables):
        assert all(str(row[0]) in shown for row in view.rows)
    figures = {path.stem for path in tmp_path.glob("*.svg")}
    assert figures == set(experiment.figures(tables))
    assert all((tmp_path / f"{figure}.svg").stat().st_size > 1_000 for figure in figures)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [(name, *told) for name, given in WRONG.items() for told in given.items()],
)
def test_a_command_says_what_is_wrong(run, name, options, message):
    assert message in " ".join(run(name, options, status=2).output.split())
