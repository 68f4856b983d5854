"""Bystanders that are changed are found changed, and those of hooks and patches are not."""

from itertools import pairwise

import pytest
import torch

from experiments.audit import differences, snapshot
from experiments.mechanisms.scenarios import Moment, answer
from experiments.questions import isolation
from experiments.questions.isolation import EXPERIMENT, SITUATIONS, UNTOUCHED
from experiments.testbed.compare import Response
from tests.experiments.tiny import SILENT
from tests.support import build, table_beside

REACHES = table_beside(__file__, "reaches")


@pytest.fixture(scope="module")
def table():
    options = isolation.Options(mechanism=("hooks", "patches", "plain hook"))
    return EXPERIMENT.measure(options, SILENT)["isolation"]


# ---- outcomes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mine():
    return answer(build("llama"))


def test_answers_differ_in_a_bit_and_in_what_a_cache_holds(mine):
    assert mine.difference(answer(build("llama"))) == ""
    assert mine.difference(isolation.in_thread(build("llama"))) == ""
    states = [tensor.clone() for tensor in mine.states]
    states[-1].view(torch.int32)[0, 0, -1, -1] ^= 1
    assert mine.difference(Response(mine.logits, states, mine.seen)).startswith("states off by")
    logits = [*mine.logits[:-1], mine.logits[-1] + 1]
    assert mine.difference(Response(logits, mine.states, mine.seen)).startswith("logits off by")
    shorter = Response(mine.logits, [states[:, :, 1:] for states in mine.states], mine.seen)
    assert "[25, 25] slots, not [26, 26]" in mine.difference(shorter)
    seen = Response(mine.logits, mine.states, [length - 1 for length in mine.seen])
    assert mine.difference(seen) == "has seen 25 tokens, not 26"


def test_outcomes(mine):
    theirs = answer(build("llama", seed=1))

    def gone():
        raise KeyError("gone")

    def became(inside, after, then=lambda: None):
        def scenario():
            yield Moment(isolation.INSIDE, mine, inside)
            yield Moment(isolation.AFTER, mine, after)
            then()

        return EXPERIMENT.outcome(scenario(), "llama")

    same, other = (lambda: mine), (lambda: theirs)
    assert became(same, same) == (UNTOUCHED, "")
    assert became(other, same)[0] == isolation.RECOVERS
    assert became(other, other)[0] == became(same, other)[0] == isolation.FOR_GOOD
    assert became(gone, other) == (isolation.ERROR, "inside: KeyError: 'gone'")
    assert became(other, gone) == (isolation.ERROR, "after: KeyError: 'gone'")
    assert became(same, same, gone) == (isolation.ERROR, "KeyError: 'gone'")


# ---- the matrix --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hooks", "patches"])
def test_hooks_and_patches_reach_nobody(name, table):
    own = table[table["mechanism"] == name].set_index("situation")["outcome"]
    assert set(own.index) == set(SITUATIONS)
    assert set(own) == {UNTOUCHED}, own


@pytest.mark.parametrize(("name", "situation", "expected"), REACHES)
def test_what_reaches_whom(name, situation, expected):
    row = EXPERIMENT.try_out(name, situation)
    assert row["outcome"] == expected, row
    assert (row["detail"] == "") == (expected == UNTOUCHED)


@pytest.mark.parametrize("name", ["permanent class patch", "attention interface"])
def test_nothing_is_carried_over_to_the_next_cell(name):
    model = build("llama")
    answer(model)
    before = snapshot(model)
    one, other = (EXPERIMENT.try_out(name, "two scopes, the outer closed first") for _ in range(2))
    assert differences(before, snapshot(model)) == ()
    assert one["outcome"] == other["outcome"]


# ---- figure, summary, command ------------------------------------------------------------------


def test_row_labels_of_two_lines_stand_apart(table):
    (figure,) = EXPERIMENT.figures({"isolation": table}).values()
    figure.draw_without_rendering()
    labels = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    line = min(label.height for label in labels)
    assert all(above.y0 - below.y1 > line / 3 for above, below in pairwise(labels))


def test_what_is_found_of_ours_and_of_others(table):
    (found,) = EXPERIMENT.findings({"isolation": table})
    assert (found.number, found.verdict) == (len(SITUATIONS), "works")
    others = table[table["mechanism"] == "plain hook"]
    assert EXPERIMENT.findings({"isolation": others})[0].verdict is None
    broken = others.assign(mechanism="hooks")
    assert EXPERIMENT.findings({"isolation": broken})[0].verdict == "breaks"
