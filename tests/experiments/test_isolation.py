"""Bystanders that are changed are found changed, and those of hooks and patches are not."""

from __future__ import annotations

import warnings

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from experiments.audit import differences, snapshot
from experiments.cli import app
from experiments.framework.command import progress_bar
from experiments.mechanisms import MECHANISMS
from experiments.questions import isolation
from experiments.questions.isolation import (
    ERROR,
    EXPERIMENT,
    FOR_GOOD,
    OUTCOMES,
    RECOVERS,
    SITUATIONS,
    UNTOUCHED,
    Options,
    Seen,
    answer,
    outcome,
    try_out,
)
from experiments.testbed.response import Response
from tests.support import build


@pytest.fixture(scope="module")
def table():
    options = Options(mechanism=("hooks", "patches", "plain hook"))
    return EXPERIMENT.measure(options, progress_bar(disable=True))["isolation"]


def test_a_press_that_is_to_evict_nothing_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        row = try_out(MECHANISMS["hooks"], "a cache filled before")
    assert row["outcome"] == UNTOUCHED


# ---- outcomes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mine():
    return answer(build("llama"))


@pytest.fixture(scope="module")
def theirs():
    return answer(build("llama", seed=1))


def test_the_same_model_answers_the_same_bits(mine):
    assert mine.difference(answer(build("llama"))) == ""


def test_one_bit_is_a_difference(mine):
    states = [tensor.clone() for tensor in mine.states]
    states[-1].view(torch.int32)[0, 0, -1, -1] ^= 1
    assert mine.difference(Response(mine.logits, states, mine.seen)).startswith("states off by")
    logits = [*mine.logits[:-1], mine.logits[-1] + 1]
    assert mine.difference(Response(logits, mine.states, mine.seen)).startswith("logits off by")


def test_differences_of_a_cache_are_named(mine):
    shorter = [states[:, :, 1:] for states in mine.states]
    assert (
        mine.difference(Response(mine.logits, shorter, mine.seen))
        == "layers hold [25, 25] slots, not [26, 26]"
    )
    seen = [length - 1 for length in mine.seen]
    assert mine.difference(Response(mine.logits, mine.states, seen)) == "has seen 25 tokens, not 26"


def test_outcomes(mine, theirs):
    broken = KeyError("gone")
    assert outcome(Seen(mine, mine, mine, mine)) == (UNTOUCHED, "")
    assert outcome(Seen(mine, theirs, mine, mine))[0] == RECOVERS
    assert outcome(Seen(mine, theirs, mine, theirs))[0] == FOR_GOOD
    assert outcome(Seen(mine, mine, mine, theirs))[0] == FOR_GOOD
    assert outcome(Seen(mine, broken, mine, mine)) == (ERROR, "inside: KeyError: 'gone'")
    assert outcome(Seen(mine, mine, mine, broken)) == (ERROR, "after: KeyError: 'gone'")


def test_an_error_in_the_reference_is_no_outcome(mine):
    with pytest.raises(KeyError):
        outcome(Seen(KeyError("reference"), mine, mine, mine))


def test_a_thread_hands_its_error_on():
    def fail():
        raise KeyError("in the thread")

    assert isinstance(isolation.in_thread(fail), KeyError)


# ---- the matrix --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hooks", "patches"])
def test_hooks_and_patches_reach_nobody(name, table):
    own = table[table["mechanism"] == name].set_index("situation")["outcome"]
    assert set(own.index) == set(SITUATIONS)
    assert set(own) == {UNTOUCHED}, own


@pytest.mark.parametrize(
    ("name", "situation", "expected"),
    [
        ("plain hook", "a deep copy made inside", FOR_GOOD),
        ("plain instance patch", "a deep copy made inside", FOR_GOOD),
        ("plain instance patch", "two scopes, the outer closed first", FOR_GOOD),
        ("attention interface", "an instance with the same config", RECOVERS),
        ("attention interface", "an instance with the same weights", UNTOUCHED),
        ("attention interface", "a deep copy made inside", ERROR),
        ("attention interface", "two scopes, the outer closed first", ERROR),
        ("attention interface", "with hooks, the outer closed first", ERROR),
        ("function mode", "instances of other classes", RECOVERS),
        ("function mode", "an instance in another thread", UNTOUCHED),
        ("function mode", "the model, in another thread", RECOVERS),
        ("function mode", "two scopes, the outer closed first", RECOVERS),
        ("registry patch", "instances of other classes", RECOVERS),
        ("registry patch", "an instance in another thread", RECOVERS),
        ("class patch", "instances of the class", RECOVERS),
        ("class patch", "instances of other classes", UNTOUCHED),
        ("class patch", "one press on two models", RECOVERS),
        ("function patch", "a cache filled before", FOR_GOOD),
        ("permanent class patch", "the model, after", FOR_GOOD),
        ("permanent class patch", "instances of the class", FOR_GOOD),
        ("permanent class patch", "instances of other classes", UNTOUCHED),
    ],
)
def test_what_reaches_whom(name, situation, expected):
    row = try_out(MECHANISMS[name], situation)
    assert row["outcome"] == expected, row
    assert (row["detail"] == "") == (expected == UNTOUCHED)


def test_all_bystanders_count():
    row = try_out(MECHANISMS["class patch"], "instances of the class")
    assert (row["bystanders"], row["touched"]) == (isolation.N_INSTANCES, isolation.N_INSTANCES)
    row = try_out(MECHANISMS["hooks"], "instances of the class")
    assert (row["bystanders"], row["touched"]) == (isolation.N_INSTANCES, 0)


def test_a_cell_is_the_same_every_time():
    one, other = (try_out(MECHANISMS["registry patch"], "instances of the class") for _ in range(2))
    assert one == other


@pytest.mark.parametrize("name", ["permanent class patch", "attention interface", "function mode"])
def test_nothing_is_carried_over_to_the_next_cell(name):
    model = build("llama")
    answer(model)
    before = snapshot(model)
    try_out(MECHANISMS[name], "two scopes, the outer closed first")
    assert differences(before, snapshot(model)) == ()


# ---- figure, summary, command ------------------------------------------------------------------


def test_figure_has_a_cell_per_row(table):
    figure = EXPERIMENT.figures({"isolation": table})["isolation"]
    panel = figure.axes[0]
    assert len(panel.patches) == len(table)
    texts = [text.get_text() for text in panel.texts]
    assert texts.count("on") == (table["outcome"] == FOR_GOOD).sum() > 0
    labels = [label.get_text().replace("\n", " ") for label in panel.get_yticklabels()]
    assert labels == list(SITUATIONS)


def test_summary_counts_and_lists(table):
    text = EXPERIMENT.markdown({"isolation": table})
    assert f"bits in **{len(SITUATIONS)}** of {len(SITUATIONS)} situations" in text
    assert f"Of {len(SITUATIONS)} situations" in text
    assert f"hooks {len(SITUATIONS)}, patches {len(SITUATIONS)}, plain hook " in text
    assert "- plain hook, a deep copy made inside: after: layers hold" in text
    assert set(table["outcome"]) <= set(OUTCOMES)


def test_what_is_found_of_ours_and_of_others(table):
    (found,) = EXPERIMENT.findings({"isolation": table})
    assert found.text.startswith("With hooks and patches, bystanders")
    assert found.verdict == "works"
    others = table[table["mechanism"] == "plain hook"]
    assert EXPERIMENT.findings({"isolation": others})[0].verdict is None
    broken = others.assign(mechanism="hooks")
    assert EXPERIMENT.findings({"isolation": broken})[0].verdict == "breaks"


@pytest.fixture
def cli():
    arguments = ["isolation", "--mechanism"]
    return lambda *more: CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "140"})


def test_command_writes_what_it_shows(cli, tmp_path):
    result = cli("patches", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "a deep copy made inside" in result.output
    assert set(pd.read_csv(tmp_path / "isolation.csv")["mechanism"]) == {"patches"}
    assert (tmp_path / "isolation.svg").stat().st_size > 3_000


def test_command_says_which_mechanisms_there_are(cli):
    result = cli("magic")
    assert result.exit_code == 2
    assert "'magic'" in result.output
    assert "class patch" in result.output
