"""The table to quote: joined from what other experiments have measured."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from experiments.framework.quotable import MISSING, ON_FRONTIER, frontier, lines, quotable

A, B, C = "KnormPress", "SnapKVPress", "FinchPress"


def quality(*rows):
    columns = ["press", "mechanism", "ratio", "question", "accuracy"]
    return pd.DataFrame(rows, columns=columns)


QUALITY = quality(
    ("no press", "bare", 0.0, "unseen", 1.0),
    *((A, m, 0.5, "unseen", 0.5) for m in ("hook", "patch")),
    *((A, m, 0.5, "seen", 0.7) for m in ("hook", "patch")),
    (B, "hook", 0.5, "unseen", 0.8),
    (B, "hook", 0.5, "seen", 1.0),
    (B, "hook", 0.8, "unseen", 0.4),
    (B, "hook", 0.8, "seen", 0.6),
    (C, "hook", 0.5, "seen", 1.0),  # which is never asked unseen
)
EVALUATE = pd.DataFrame(
    [
        ("one", "no press", 0.0, "bare", 1.0),
        ("one", "SnapKVPress", 0.5, "hook", 0.6),
        ("two", "SnapKVPress", 0.5, "hook", 0.8),
        ("one", "AdaKVPress(SnapKVPress())", 0.8, "hook", 0.25),
    ],
    columns=["dataset", "press", "ratio", "mechanism", "score"],
)
FIRST = pd.DataFrame(
    [
        ("narrow", 4096, "no press", 0.0, 1.0, 1.0, 1000),
        ("narrow", 4096, A, 0.5, 1.1, 1.5, 500),
        ("narrow", 4096, B, 0.5, 1.2, 1.4, 510),
        ("narrow", 4096, B, 0.8, 1.3, 1.9, 200),
        ("wide", 4096, "no press", 0.0, 1.0, 1.0, 9000),
        ("wide", 4096, A, 0.5, 9.9, 9.9, 4500),
    ],
    columns=["model", "context", "press", "ratio", "first", "speed", "bytes"],
)
LOGITS = pd.DataFrame(
    [(A, 0.5, 2.5, True), (B, 0.5, 0.125, True)],
    columns=["press", "ratio", "logit_error", "equal"],
)
TABLES = {
    "quality": QUALITY,
    "evaluate": EVALUATE,
    "throughput_first": FIRST,
    "error_logits": LOGITS,
}


def part(**tables):
    return SimpleNamespace(tables=tables, error=None)


def test_what_is_joined():
    joined = {(line.press, line.ratio): line for line in lines(TABLES)}
    assert set(joined) == {(A, 0.5), (B, 0.5), (B, 0.8), (C, 0.5), ("AdaKVPress", 0.8)}
    knorm = joined[A, 0.5]
    assert knorm.facts == pytest.approx(0.6)
    assert knorm[3:] == (None, 1.1, 1.5, 0.5, 2.5, True)
    assert joined[B, 0.5].pipeline == pytest.approx(0.7)
    assert joined[C, 0.5].facts is None
    assert joined["AdaKVPress", 0.8][2:] == (None, 0.25, None, None, None, None, None)


def test_by_ratio_and_the_most_right_first():
    order = [(line.press, line.ratio) for line in lines(TABLES)]
    assert order == [(B, 0.5), (A, 0.5), (C, 0.5), (B, 0.8), ("AdaKVPress", 0.8)]


def test_the_frontier():
    """Knorm holds less than SnapKV at the same ratio, and answers less; then one beats both."""
    assert frontier(lines(TABLES)) == {(A, 0.5), (B, 0.5), (B, 0.8)}
    better = QUALITY.assign(
        accuracy=[0.9 if row[:2] == (B, 0.8) else row[2] for row in _rows(QUALITY)]
    )
    assert frontier(lines(TABLES | {"quality": better})) == {(B, 0.8)}


def _rows(table):
    return list(zip(table["press"], table["ratio"], table["accuracy"], strict=True))


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("error_logits", LOGITS.assign(equal=[False, True])),
        (
            "quality_agreement",
            pd.DataFrame({"press": [A], "ratio": [0.5], "answers": [8], "same": [7]}),
        ),
        ("equivalence", pd.DataFrame({"press": [A, A], "compared": 2, "differ": [0, 1]})),
    ],
)
def test_bits_that_differ_anywhere_are_told(name, table):
    joined = {(line.press, line.ratio): line.equal for line in lines(TABLES | {name: table})}
    assert joined[A, 0.5] is False
    assert joined[B, 0.5] is True


def test_missing_cells_say_so():
    table = quotable([part(quality=QUALITY), part(evaluate=EVALUATE)])
    assert len(table.rows) == 5
    row = next(row for row in table.rows if row[1:3] == ["Knorm", "50%"])
    assert row == ["", "Knorm", "50%", "60%", *[MISSING] * 6]
    assert f"{MISSING} not measured" in table.note
    whole = quotable([part(**TABLES)])
    assert whole.rows[0][:3] == [ON_FRONTIER, "SnapKV", "50%"]
    assert whole.rows[0][3:] == ["90%", "70%", "1.20", "1.40", "0.51", "0.125", "yes"]
    assert "narrow, 4,096 tokens" in whole.note


def test_a_study_without_accuracy_has_none():
    assert quotable([part(error_logits=LOGITS)]) is None
    failed = SimpleNamespace(tables=TABLES, error="RuntimeError: no")
    assert quotable([failed]) is None
