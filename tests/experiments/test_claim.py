"""Single findings of a study, measured again."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated

import pandas as pd
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import experiments
from experiments import load_experiments
from experiments.cli import app
from experiments.framework.experiment import Claim, Experiment, Finding
from experiments.study import run_study


@dataclass(frozen=True)
class Options:
    grams: Annotated[float, typer.Option(help="What the scale says.")] = 1234.5


class Weight(Experiment[Options]):
    """Weigh one thing."""

    name, title, question, method = "weight", "Weight", "How heavy is it?", "It is weighed."
    full = quick = Options()

    def __init__(self, again, within=0.0):
        self.claims = {"grams": Claim(Options(again), within)}

    def measure(self, options, progress):
        return {"weight": pd.DataFrame({"grams": [options.grams]})}

    def findings(self, tables):
        grams = tables["weight"]["grams"][0]
        return [
            Finding("grams", f"It weighs **{grams:,.1f}** grams."),
            Finding("once", "It was weighed **1** time."),
        ]


@pytest.fixture
def claim(monkeypatch, tmp_path):
    """Run `claim` where 1,234.5 grams are committed, and something else may be measured."""

    def run(*args, again=1234.5, within=0.0):
        weight = Weight(again, within)
        monkeypatch.setattr(experiments, "EXPERIMENTS", {"weight": ""})
        module = SimpleNamespace(EXPERIMENT=weight)
        monkeypatch.setitem(sys.modules, "experiments.questions.weight", module)
        assert run_study([weight], tmp_path, Console(quiet=True), full=True) == []
        return CliRunner().invoke(app, ["claim", *args, "--results", str(tmp_path)])

    return run


@pytest.mark.parametrize(
    ("again", "within", "word", "status"),
    [
        (1234.5, 0, "agrees", 0),
        (1234.6, 0, "differs", 1),
        (1234.6, 0.1, "agrees", 0),
        (1234.7, 0.1, "differs", 1),
        (-1234.5, 1, "differs", 1),
    ],
)
def test_both_numbers_are_told(claim, again, within, word, status):
    result = claim("weight-grams", again=again, within=within)
    assert result.exit_code == status, result.output
    assert f"weight-grams {word}: {again:g} here, 1234.5 in" in result.output


def test_without_a_name_they_are_listed(claim):
    result = claim()
    assert result.exit_code == 0
    assert result.output == "weight-grams: It weighs 1,234.5 grams.\n"


def test_other_names_are_refused(claim):
    for name in ("weight-once", "height"):
        result = claim(name)
        assert result.exit_code == 2
        assert f"{name!r} cannot be measured again; there are weight-grams" in result.stderr


def test_the_first_page_can_be_measured_again():
    claims = {f"{one.name}-{name}" for one in load_experiments() for name in one.claims}
    assert {
        *("equivalence-bits", "intrusiveness-left"),
        *("overhead-decode", "headwise-freeing"),
    } <= claims


def test_a_finding_of_the_study_is_measured_again():
    (headwise,) = (one for one in load_experiments() if one.name == "headwise")
    from experiments.claim import measured_again

    assert measured_again(headwise, "freeing").number == pytest.approx(0.2, abs=0.01)
