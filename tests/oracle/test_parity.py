"""The same tokens are kept as kvpress keeps."""

import pytest

import hooks_impl
from tests.oracle.cases import CASES, MECHANISMS, Case
from tests.oracle.differences import NOT_IN_KVPRESS
from tests.oracle.parity import agreement, compare, held_by

GRID = [
    pytest.param(case, ratio, id=f"{case.press} on {case.setting}, {case.run}: {ratio}")
    for case in CASES
    for ratio in case.ratios
]


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(("case", "ratio"), GRID)
def test_same_kept_sets(case, ratio, mechanism):
    found = agreement(case, ratio, mechanism)
    assert found.heads >= case.setting.n_layers
    assert found, found.first


def test_every_press_has_an_oracle():
    compared = set().union(*(case.presses for case in CASES))
    assert compared.isdisjoint(NOT_IN_KVPRESS)
    assert compared | NOT_IN_KVPRESS.keys() == hooks_impl.PRESSES.keys()


def test_what_differs_is_noticed():
    """In which tokens are kept, and in their keys."""
    texts = "KnormPress(r)", "KeyDiffPress(r)", "KeyRerotationPress(KnormPress(r))"
    first, second, turned = (held_by("kvpress", Case(text)) for text in texts)
    assert compare(first, first)
    assert not compare(first, second)
    assert "keys differ" in compare(first, turned).first
