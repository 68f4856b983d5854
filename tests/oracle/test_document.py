"""docs/parity.md is what a run would write."""

from __future__ import annotations

from tests.oracle import test_differences
from tests.oracle.differences import DIFFERENCES
from tests.oracle.parity import DOCUMENT, document


def test_document(request):
    if request.config.getoption("--write-parity"):
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(document())
    assert DOCUMENT.read_text() == document(), "run `make parity`"


def test_every_difference_is_noted_once():
    tests = [difference.test for difference in DIFFERENCES]
    assert len(tests) == len(set(tests))
    defined = {name for name in vars(test_differences) if name.startswith("test_")}
    assert set(tests) == defined
