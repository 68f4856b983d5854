"""What is kept differently on purpose: what kvpress does, what is done here, and that they differ.

A test of `kept.yaml` and `works.yaml` fails as soon as either side changes.
"""

import re

import pytest

from tests.oracle import cases, handed, looks
from tests.oracle.cases import MECHANISMS, Case
from tests.oracle.differences import DIFFERENCES
from tests.oracle.parity import compare

NAMES = vars(cases) | vars(handed) | vars(looks)


def each(difference):
    """What is looked at, a case, what is expected of it, and by which mechanism."""
    for shown in difference["shown"]:
        presses = shown["press"] if isinstance(shown["press"], list) else [shown["press"]]
        run = eval(shown.get("run", "ONE_ROW"), NAMES)
        setting = NAMES[shown.get("setting", "LLAMA")]
        for press in presses:
            for mechanism in shown.get("mechanisms", MECHANISMS):
                label = f"{shown['see']} of {press}, {mechanism}"
                look, case = eval(shown["see"], NAMES), Case(press, run=run, setting=setting)
                yield pytest.param(look, case, shown, mechanism, id=label)


def what(look, case, whose):
    try:
        return look(case, whose)
    except Exception as error:
        return error


def check(found, expected):
    if isinstance(found, Exception) and not isinstance(expected, dict):
        raise found
    if isinstance(expected, dict):
        assert expected["fails"] in [kind.__name__ for kind in type(found).__mro__]
        assert re.search(expected.get("says", ""), str(found))
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("look", "case", "shown", "mechanism"), [x for of in DIFFERENCES for x in each(of)]
)
def test_difference(look, case, shown, mechanism):
    here, there = (what(look, case, whose) for whose in (mechanism, "kvpress"))
    if "here" in shown:
        check(here, shown["here"])
    if shown.get("there") not in (None, "the same"):
        check(there, shown["there"])
        return
    for found in (here, there):
        if isinstance(found, Exception):
            raise found
    same = compare(here, there) if look is looks.everything else here == there
    assert bool(same) == ("there" in shown)
