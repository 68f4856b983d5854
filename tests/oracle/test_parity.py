"""The same tokens are kept as kvpress keeps."""

from __future__ import annotations

import pytest

import hooks_impl
from tests.oracle.cases import CASES, Case
from tests.oracle.differences import NOT_IN_KVPRESS
from tests.oracle.parity import MECHANISMS, agreement, compare, theirs

GRID = [
    pytest.param(case, ratio, id=f"{case.name} on {case.setting}, {case.run}: {ratio}")
    for case in CASES
    for ratio in case.ratios
]


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("case", "ratio"), GRID)
def test_same_kept_sets(case, ratio, mechanism, record_property):
    found = agreement(case, ratio, mechanism)
    for name, value in (("combination", case.name), ("heads", found.heads), ("same", found.same)):
        record_property(name, value)  # for the summary at the end
    assert found.heads >= case.setting.n_layers
    assert found, found.first


def test_every_press_has_an_oracle():
    compared = set().union(*(case.presses for case in CASES))
    assert compared.isdisjoint(NOT_IN_KVPRESS)
    assert compared | NOT_IN_KVPRESS.keys() == hooks_impl.PRESSES.keys()
    assert len({case.name for case in CASES}) >= 40


def test_what_differs_is_noticed():
    """In which tokens are kept, and in their keys."""
    first, second = Case(lambda p, r: p.KnormPress(r)), Case(lambda p, r: p.KeyDiffPress(r))
    assert compare(theirs(first, 0.5), theirs(first, 0.5))
    assert not compare(theirs(first, 0.5), theirs(second, 0.5))
    turned = Case(lambda p, r: p.KeyRerotationPress(p.KnormPress(r)))
    assert "keys differ" in compare(theirs(first, 0.5), theirs(turned, 0.5)).first
