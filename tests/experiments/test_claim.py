"""Single findings of a study, measured again."""

from dataclasses import replace

import pytest

from experiments import load_experiments
from experiments.claim import measured_again
from experiments.framework.experiment import Claim, Finding
from tests.experiments.tiny import CASES, Options, cli, study, tiny


def findings(tables):
    grams = tables["weight"]["x"].iloc[-1]
    return [
        Finding("grams", f"It weighs **{grams:,.1f}** grams."),
        Finding("once", "It was weighed **1** time."),
    ]


@pytest.fixture
def claim(registered, tmp_path):
    """Run `claim` where 1,234.5 grams are committed, and something else may be measured."""

    def run(*args, again=1234.5, within=0.0, status=0):
        claims = {"grams": Claim(Options(again), within)}
        weight = tiny("weight", full=Options(1234.5), findings=findings, claims=claims)
        registered(weight)
        assert study([weight], tmp_path)[0] == []
        return cli("claim", *args, "--results", tmp_path, status=status)

    return run


@pytest.mark.parametrize(("again", "within", "word", "status"), CASES["agreeing"])
def test_both_numbers_are_told(claim, again, within, word, status):
    result = claim("weight-grams", again=again, within=within, status=status)
    assert f"weight-grams {word}: {again:g} here, 1234.5 in" in result.output
    assert f"here: It weighs **{again:,.1f}** grams.\n" in result.output


def test_without_a_name_they_are_listed(claim):
    assert claim().output == "weight-grams: It weighs 1,234.5 grams.\n"


def test_other_names_are_refused(claim):
    for name in ("weight-once", "height"):
        told = claim(name, status=2).stderr
        assert f"{name!r} " in told.partition("weight-grams")[0]


def test_the_first_page_can_be_measured_again(monkeypatch):
    claims = {f"{one.name}-{name}": one for one in load_experiments() for name in one.claims}
    first = {"equivalence-bits", "intrusiveness-left", "overhead-decode", "headwise-freeing"}
    assert first <= set(claims)
    headwise = claims["headwise-freeing"]
    freeing = headwise.claims["freeing"]
    short = freeing._replace(options=replace(freeing.options, contexts=(512,)))
    monkeypatch.setitem(headwise.claims, "freeing", short)
    assert measured_again(headwise, "freeing").number == pytest.approx(0.2, abs=0.01)
