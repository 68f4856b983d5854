"""The matrix of who gets along: it can tell right from wrong, and ours is never wrong."""

from __future__ import annotations

from contextlib import contextmanager

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import hooks_impl
from experiments.cli import app
from experiments.interventions import COMPANIONS, Intervention
from experiments.questions import coexistence
from experiments.questions.coexistence import (
    AFTER,
    BEFORE,
    ERROR,
    EXPERIMENT,
    INSIDE,
    MINE,
    PHASES,
    RIGHT,
    WRONG,
    Options,
    try_out,
)
from tests.support import snapshot, token_ids

QUICK = [name for name, companion in COMPANIONS.items() if not companion.is_slow]
# A hook cannot follow a query projection that is replaced while it is open, and says so.
REPLACES_PROJECTIONS = ("PEFT LoRA", "PEFT LoRA, merged", "quanto int8 weights")


@pytest.mark.parametrize("mechanism", MINE)
@pytest.mark.parametrize("companion", QUICK)
def test_nothing_is_silently_wrong_for_ours(mechanism, companion):
    for phase in PHASES:
        row = try_out(mechanism, companion, phase)
        replaced = companion in REPLACES_PROJECTIONS and phase == INSIDE
        if mechanism == "hooks, SnapKV" and replaced:
            assert row["outcome"] == ERROR
            assert "ScopeError: the module that computes the query" in row["detail"]
        else:
            assert row["outcome"] == RIGHT, row


@pytest.mark.parametrize("companion", COMPANIONS)
def test_companions_undo_what_they_do(companion):
    model = coexistence.small("llama")
    ids = token_ids(1, 24)
    before, logits = snapshot(model), model(ids).logits
    with COMPANIONS[companion].scope(model):
        pass
    # PEFT takes the adapter out of the weights again by arithmetic.
    torch.testing.assert_close(model(ids).logits, logits)
    changed = {key for key, value in snapshot(model).items() if before.get(key) != value}
    # accelerate and checkpointing leave attributes; no forward but accelerate's own.
    if "accelerate" not in companion:
        assert not [key for key in changed if key.endswith(".forward")]


def test_a_plain_class_patch_does_not_see_a_module_that_accelerate_hooks():
    row = try_out("class patch", "accelerate hook", BEFORE)
    assert row["outcome"] == WRONG
    assert "slots" in row["detail"]


@contextmanager
def spoilt(model):
    """Other logits than the model's, once a press has been open."""
    yield lambda *args, **kwargs: model(*args, **kwargs)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def test_a_companion_that_spoils_the_model_is_wrong(monkeypatch):
    monkeypatch.setitem(COMPANIONS, "spoilt", Intervention(spoilt))
    row = try_out("hooks", "spoilt", INSIDE)
    assert row["outcome"] == WRONG
    assert row["detail"].startswith("inside, alone again")


def test_a_press_that_does_not_act_is_wrong(monkeypatch):
    idle = lambda: hooks_impl.KnormPress(0.0)  # noqa: E731
    monkeypatch.setitem(coexistence.TRIED, "hooks", idle)
    row = try_out("hooks", "nothing else", BEFORE)
    assert row["outcome"] == WRONG
    assert "layers hold [24, 24] slots, not [12, 12]" in row["detail"]


def test_a_press_that_stays_is_wrong(monkeypatch):
    @contextmanager
    def staying(model):
        hooks_impl.KnormPress(0.5).register(model)
        yield

    monkeypatch.setitem(coexistence.TRIED, "hooks", lambda: staying)
    row = try_out("hooks", "nothing else", AFTER)
    assert (row["outcome"], row["detail"][:15]) == (WRONG, "after the scope")


def table(**outcomes):
    rows = [
        {"mechanism": name, "companion": "PEFT LoRA", "phase": phase, "outcome": outcome}
        for name, found in outcomes.items()
        for phase, outcome in zip(PHASES, found, strict=True)
    ]
    return {"coexistence": pd.DataFrame(rows).assign(detail="so it is")}


def test_what_is_said_is_read_off_the_table():
    said = EXPERIMENT.markdown(table(hooks=[RIGHT, ERROR, RIGHT], other=[RIGHT, WRONG, ERROR]))
    assert "hooks and patches of this project are silently wrong in **0** of 3 trials" in said
    assert "the other mechanisms are silently wrong in **1** of 3 trials" in said
    assert said.count("raise an error in 1.") == 2
    assert "| PEFT LoRA | error | wrong |" in said
    assert "- hooks, PEFT LoRA, inside the scope: so it is" in said
    found = table(hooks=[RIGHT] * 3, late=[WRONG] * 3)["coexistence"]
    alone = EXPERIMENT.markdown({"coexistence": found.assign(companion="nothing else")})
    assert "- late, nothing else, before the scope: so it is" in alone


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [([RIGHT] * 3, "works"), ([RIGHT, ERROR, RIGHT], "costs"), ([ERROR, WRONG, RIGHT], "breaks")],
)
def test_the_verdict_is_that_of_ours(outcomes, verdict):
    own, others = EXPERIMENT.findings(table(hooks=outcomes, other=[WRONG] * 3))
    assert (own.verdict, others.verdict) == (verdict, None)


def test_command(tmp_path):
    arguments = ["coexistence", "--mechanism", "hooks", "--output", str(tmp_path), "--companion"]
    result = CliRunner().invoke(app, [*arguments, "inference mode"])
    assert result.exit_code == 0, result.output
    assert "silently wrong in 0 of 3 trials" in " ".join(result.output.split())
    assert len(pd.read_csv(tmp_path / "coexistence.csv")) == len(PHASES)
    assert (tmp_path / "coexistence.svg").exists()
    result = CliRunner().invoke(app, [*arguments, "PEFT"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "'PEFT' is unknown" in result.output


def test_slow_companions_are_left_to_ours():
    options = Options(mechanism=("hooks", "class patch"), companion=("torch.compile",))
    cells = EXPERIMENT.cells(options)
    assert [(name, phase) for name, _, phase in cells] == [("hooks", BEFORE), ("hooks", INSIDE)]
