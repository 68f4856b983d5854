"""Every structural kind of decoder: presses are right there, or refused before anything happens."""

import os
import warnings
from pathlib import Path

import pandas as pd
import pytest

from experiments.framework.results import read_table
from experiments.questions import architectures
from experiments.questions.architectures import EXPERIMENT, cells, reach, sweep
from experiments.questions.architectures.cells import SUBJECTS, Bench, Cell
from experiments.questions.architectures.decoders import build, decoders
from experiments.questions.architectures.sweep import BAD, COLUMNS, condensed, measure, rows_of
from press_core import PressError, attention_sites
from tests.experiments.tiny import CASES, SILENT
from tests.support import IS_5_2, table_beside

KNOWN = decoders()
RESULTS = Path(__file__).parents[2] / "results"

REFUSED = table_beside(__file__, "refused")


def some_conditions(cell):
    """Eager attention with the model's own cache, and in turn one more condition.

    Every other press gets, by one of the mechanisms in turn, a cache that is handed over, under
    eager attention, or a padded batch, under sdpa.
    """
    if cell.padded != (cell.attention == "sdpa"):
        return False
    turn = [*SUBJECTS].index(cell.press) + (cell.mechanism == "hook")
    of_turn = turn % 4 == (0 if cell.padded else 2)
    return of_turn or (cell.cache == "default" and not cell.padded)


@pytest.mark.parametrize("name", architectures.REPRESENTATIVES)
def test_a_press_is_right_or_refused_when_its_scope_opens(name):
    asked = filter(some_conditions, cells.cells())
    rows = pd.DataFrame(rows_of(KNOWN[name], asked), columns=COLUMNS)
    bad = rows[rows["outcome"].isin(BAD)]
    assert bad.empty, bad[["press", "mechanism", "attention", "cache", "outcome", "reason"]]
    reached = reach(condensed(rows)).set_index("press")["reach"]
    refused = REFUSED.get(name, {})
    if IS_5_2:
        refused = refused.get("on 5.2", refused)
    by_both = refused.get("both", ())
    by_neither = SUBJECTS if by_both == "all" else by_both
    expected = dict.fromkeys(SUBJECTS, architectures.BOTH)
    expected |= dict.fromkeys(by_neither, architectures.NEITHER)
    expected |= dict.fromkeys(refused.get("hooks", ()), architectures.PATCH)
    assert dict(reached) == expected


def test_most_types_can_be_built():
    assert len(KNOWN) > 150


def test_a_model_that_needs_more_than_text_is_left_out():
    with pytest.raises(cells.NotApplicableError, match="pixel_values"):
        Bench(build(KNOWN["blip"]))


# ---- the references tell right from wrong --------------------------------------------------------


FORMULA = "press_core.presses.keys.knorm_scores"
FORGETFUL = "press_core.cache.pruned.PrunedLayer.get_seq_length"


def _refusing(keys):
    raise PressError("not after all")


def _warning(keys):
    warnings.warn("KnormPress: nothing is wrong", stacklevel=1)
    return -keys.float().norm(dim=-1)


@pytest.mark.parametrize(
    ("target", "planted", "outcome", "reason"),
    [
        (FORMULA, lambda keys: keys.float().norm(dim=-1), "wrong", "keeps a token that scores"),
        # Positions that continue from what is stored, as they would in a cache that has forgotten.
        (FORGETFUL, lambda layer: layer.n_slots, "wrong", "logits are off"),
        (FORMULA, lambda keys: keys[1:][0], "crash", "IndexError: "),
        (FORMULA, _refusing, "refused late", "PressError: not after all"),
        (FORMULA, _warning, "false warning", "KnormPress: nothing"),
    ],
)
def test_a_planted_fault_is_found(monkeypatch, target, planted, outcome, reason):
    attention_sites(build(KNOWN["llama"]))  # a probe would find what is planted
    monkeypatch.setattr(target, planted)
    for mechanism in ("hook", "patch"):
        cell = Cell("Knorm", mechanism, "eager", "default", padded=False)
        found, why = Bench(build(KNOWN["llama"])).outcome(cell)
        assert found == outcome
        assert found in BAD
        assert reason in why


# ---- the table -----------------------------------------------------------------------------------


def test_the_worst_condition_counts(monkeypatch):
    rows = pd.DataFrame(CASES["conditions"], columns=COLUMNS)
    monkeypatch.setattr(architectures, "measure", lambda *_, **__: rows)
    monkeypatch.setattr(architectures, "OLDEST", RESULTS)  # a folder runs nothing
    (table,) = EXPERIMENT.measure(architectures.Options(), SILENT).values()
    (row,) = table.to_dict("records")
    assert (row["hook"], row["patch"], row["reason"]) == ("wrong", "right", "off")
    assert (row["cells"], row["bad"]) == (3, 1)
    assert list(reach(table)["reach"]) == [architectures.WRONG]
    assert not EXPERIMENT.passed({"architectures": table})


def test_decoders_are_swept_in_order():
    seen = []
    rows = measure(["llama", "gpt2"], lambda cell: cell.press == "Knorm", seen.append)
    assert seen == list(rows["type"].unique()) == ["llama", "gpt2"]
    assert set(rows["outcome"]) == {"right"}
    assert not rows.duplicated(COLUMNS[:6]).any()
    assert set(rows["cache"]) == {"default"}  # as which a DynamicCache() is known


def dies(*_):
    os._exit(3)


def test_a_process_that_dies_is_an_outcome(monkeypatch):
    monkeypatch.setattr(sweep, "rows_of", dies)
    (outcome,) = measure(["llama"])["outcome"]
    assert outcome == "crash"


def test_a_decoder_counts_for_a_press_that_is_right_on_all_of_its_variants(monkeypatch):
    of = {"llama": architectures.BOTH, "gpt (old)": architectures.BOTH}
    of |= {"gpt (new)": architectures.NEITHER, "t5 (a)": architectures.BOTH}
    reached = pd.DataFrame({"type": of.keys(), "press": "Knorm", "reach": of.values()})
    monkeypatch.setattr(architectures, "reach", lambda _: reached)
    table = pd.DataFrame({"bad": [0], "cells": [4]})
    found, *_ = EXPERIMENT.findings({"architectures": table})
    assert all(x in found.text for x in ("All 7 ", "on 2 of 3 decoders, at least one on **2**"))


def test_nothing_is_wrong_in_the_committed_results():
    tables = {path.stem: read_table(path) for path in RESULTS.glob("architectures*.csv")}
    assert EXPERIMENT.passed(tables)
    reached, _ = EXPERIMENT.findings(dict(sorted(tables.items())))
    assert reached.verdict == "works"
