"""The matrix of who gets along: it can tell right from wrong, and ours is never wrong."""

from contextlib import contextmanager

import pandas as pd
import pytest

import hooks_impl
from experiments.interventions import COMPANIONS, Intervention
from experiments.questions import coexistence
from experiments.questions.coexistence import ERROR, EXPERIMENT, MINE, PHASES, RIGHT, WRONG

BEFORE, INSIDE, AFTER = PHASES
QUICK = [name for name, companion in COMPANIONS.items() if not companion.is_slow]
# A hook cannot follow a query projection that is replaced while it is open, and says so.
REPLACES_PROJECTIONS = ("PEFT LoRA", "PEFT LoRA, merged", "quanto int8 weights")


@pytest.mark.parametrize(
    ("mechanism", "companion"),
    # an export has no cache and takes seconds
    [(m, c) for m in MINE for c in QUICK if c != "torch.export" or m.endswith("SnapKV")],
)
def test_nothing_is_silently_wrong_for_ours(mechanism, companion):
    for phase in PHASES:
        row = EXPERIMENT.try_out(mechanism, companion, phase)
        replaced = companion in REPLACES_PROJECTIONS and phase == INSIDE
        if mechanism == "hooks, SnapKV" and replaced:
            assert row["outcome"] == ERROR
            assert "ScopeError: " in row["detail"].partition("query")[0]
        else:
            assert row["outcome"] == RIGHT, row


def test_a_plain_class_patch_does_not_see_a_module_that_accelerate_hooks():
    row = EXPERIMENT.try_out("class patch", "accelerate hook", BEFORE)
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
    row = EXPERIMENT.try_out("hooks", "spoilt", INSIDE)
    assert row["outcome"] == WRONG
    assert row["detail"].startswith("inside, alone again")


@contextmanager
def staying(model):
    hooks_impl.KnormPress(0.5).register(model)
    yield


@pytest.mark.parametrize(
    ("opens", "phase", "detail"),
    [
        (hooks_impl.KnormPress(0.0), BEFORE, "[26, 26] slots, not [14, 14]"),
        (staying, AFTER, "after the scope: "),
    ],
    ids=["does not act", "stays"],
)
def test_a_press_that_does_not_act_or_stays_is_wrong(monkeypatch, opens, phase, detail):
    monkeypatch.setitem(coexistence.TRIED, "hooks", opens)
    row = EXPERIMENT.try_out("hooks", "nothing else", phase)
    assert row["outcome"] == WRONG
    assert detail in row["detail"]


def table(**outcomes):
    rows = [
        {"mechanism": name, "companion": "PEFT LoRA", "phase": phase, "outcome": outcome}
        for name, found in outcomes.items()
        for phase, outcome in zip(PHASES, found, strict=True)
    ]
    return {"coexistence": pd.DataFrame(rows).assign(detail="so it is")}


def test_what_is_said_is_read_off_the_table():
    tables = table(hooks=[RIGHT, ERROR, RIGHT], other=[RIGHT, WRONG, ERROR])
    assert [finding.number for finding in EXPERIMENT.findings(tables)] == [0, 1]
    said = EXPERIMENT.markdown(tables)
    assert said.count("and raise errors in 1.") == 2
    assert "**1** of 3 trials (1 with other)" in said
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


def test_slow_companions_are_left_to_ours():
    options = coexistence.Options(mechanism=("hooks", "class patch"), companion=("torch.compile",))
    cells = EXPERIMENT.cells(options)
    assert [(name, phase) for name, _, phase in cells] == [("hooks", BEFORE), ("hooks", INSIDE)]
