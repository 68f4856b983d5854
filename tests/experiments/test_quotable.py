"""The table to quote: joined from what other experiments have measured."""

from types import SimpleNamespace

import pandas as pd

from experiments.framework.quotable import MISSING, ON_FRONTIER, frontier, joined, quotable
from tests.support import table_beside

A, B, C = "KnormPress", "SnapKVPress", "FinchPress"
TABLES = {name: pd.DataFrame(**rows) for name, rows in table_beside(__file__, "quotable").items()}
QUALITY = TABLES["quality"]


def part(error=None, **tables):
    return SimpleNamespace(tables=tables, error=error)


def test_what_is_joined_by_ratio_and_the_most_right_first():
    found = joined(TABLES)
    assert list(found.index) == [(B, 0.5), (A, 0.5), (C, 0.5), (B, 0.8), ("AdaKVPress", 0.8)]
    by_hand = table_beside(__file__, "cases")["joined"]
    expected = pd.DataFrame(by_hand, found.index, found.columns, dtype=float)
    pd.testing.assert_frame_equal(found, expected, check_dtype=False)


def best(tables):
    rows = joined(tables)
    return set(rows.index[frontier(rows)])


def test_the_frontier():
    """Knorm holds less than SnapKV at the same ratio, and answers less; then one beats both."""
    assert best(TABLES) == {(A, 0.5), (B, 0.5), (B, 0.8)}
    is_last = (QUALITY["press"] == B) & (QUALITY["ratio"] == 0.8)
    better = QUALITY.assign(accuracy=QUALITY["accuracy"].mask(is_last, 0.9))
    assert best(TABLES | {"quality": better}) == {(B, 0.8)}


def test_missing_cells_say_so():
    table = quotable([part(quality=QUALITY), part(evaluate=TABLES["evaluate"])])
    assert len(table.rows) == 5
    row = next(row for row in table.rows if row[0:3:2] == ["Knorm", "50%"])
    assert row == ["Knorm", "", "50%", "50%", "70%", *[MISSING] * 5]
    assert f"{MISSING} means not measured" in table.note
    whole = quotable([part(**TABLES)])
    assert whole.rows[0][:3] == ["SnapKV", ON_FRONTIER, "50%"]
    assert whole.rows[0][3:] == ["80%", "100%", "70%", "1.20", "1.40", "0.51", "0.125"]
    assert "narrow, 4,096 tokens, batch 1" in whole.note


def test_a_study_without_accuracy_has_none():
    assert quotable([part(error_logits=TABLES["error_logits"])]) is None
    assert quotable([part("RuntimeError: no", **TABLES)]) is None
    assert quotable([part(equivalence=pd.DataFrame())]) is None
