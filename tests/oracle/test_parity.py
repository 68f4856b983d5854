"""The same tokens are kept as kvpress keeps."""

import inspect
import json
import os
from dataclasses import asdict, replace
from io import StringIO

import kvpress
import pytest

import hooks_impl
from experiments.questions import overhead, throughput
from experiments.testbed import with_kvpress
from tests.oracle import timing
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
    assert found.heads >= case.setting.num_layers
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


def first_fields(press):
    """By name the arguments of a press and their defaults, where these are plain values."""
    fields = inspect.signature(press).parameters.values()
    told = {field.name: field.default for field in fields if not field.name.startswith("_")}
    return [(name, x if isinstance(x, (int, float, str)) else None) for name, x in told.items()]


def test_first_fields_and_their_defaults_are_those_of_kvpress():
    names = hooks_impl.PRESSES.keys() & vars(kvpress)
    assert len(names) == 44
    for name in names:
        ours, theirs = map(first_fields, (hooks_impl.PRESSES[name], getattr(kvpress, name)))
        order = sorted if name == "KVComposePress" else list  # here the ratio comes first, as ever
        assert order(ours[: len(theirs)]) == order(theirs), name


@pytest.mark.parametrize("name", throughput.INSIDE)
def test_presses_run_on_the_stand_in_that_times_them(name, monkeypatch):
    monkeypatch.setattr(timing, "LENGTH", 128)
    monkeypatch.setattr("tests.oracle.stand_in.REPLAYED", 16)
    assert all(row.ours_ms > 0 and row.kvpress_ms > 0 for row in timing._compare(name))


@pytest.mark.parametrize(
    ("experiment", "options", "ratio"),
    [
        (overhead, {"layers": [2], "context": 64}, "ratio"),
        (throughput, {"ratio": [0.5], "context": [128], "batch": [1]}, "speed_over_hook"),
    ],
)
def test_its_presses_take_turns_with_those_of_hooks(experiment, options, ratio, capfd, monkeypatch):
    """As `experiments` asks its interpreter: arguments as JSON, only rows on standard output."""
    rows_of = experiment.beside_kvpress

    def beside_kvpress(**asked):
        os.write(1, b"what a library says")
        return rows_of(**asked)

    asked = asdict(replace(experiment.EXPERIMENT.quick, rounds=2, press=["AdaKV"], **options))
    monkeypatch.setattr(experiment, "beside_kvpress", beside_kvpress)
    monkeypatch.setattr("sys.stdin", StringIO(json.dumps(asked)))
    with_kvpress.main(experiment.__name__)
    rows = json.loads(capfd.readouterr().out)
    assert {row["mechanism"] for row in rows} == {"kvpress"}
    assert all(row["press"] == "AdaKVPress" and row[ratio] > 0 for row in rows)
