"""Comparing with kvpress, and writing down what came out."""

from __future__ import annotations

import textwrap
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import kvpress
import torch

import hooks_impl
import patch_impl
from tests.oracle.cases import CASES, Case
from tests.oracle.differences import DIFFERENCES, NOT_IN_KVPRESS
from tests.oracle.running import Held, held_after, model_for

MECHANISMS = {"hooks": hooks_impl, "patches": patch_impl}
DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"


class Agreement(NamedTuple):
    """How far what two presses hold agrees.

    Attributes:
        heads: KV heads that were compared, over layers and rows.
        same: those that hold the same tokens, and the same keys of them.
        first: the first head that does not, in words; empty where all do.
    """

    heads: int
    same: int
    first: str = ""

    def __bool__(self) -> bool:
        return self.heads == self.same


@cache
def theirs(case: Case, ratio: float) -> Held:
    """What kvpress holds."""
    press = (case.theirs or case.build)(kvpress, ratio)
    return held_after(case.run, press, model_for("kvpress", case.setting))


@cache
def ours(case: Case, ratio: float, mechanism: str) -> Held:
    """What this repository holds."""
    press = case.build(MECHANISMS[mechanism], ratio)
    return held_after(case.run, press, model_for(mechanism, case.setting))


@cache
def agreement(case: Case, ratio: float, mechanism: str) -> Agreement:
    return compare(ours(case, ratio, mechanism), theirs(case, ratio))


def compare(ours: Held, theirs: Held) -> Agreement:
    """Head by head, whatever the order in the cache."""
    assert [len(layer) for layer in ours] == [len(layer) for layer in theirs]
    heads = same = 0
    first = ""
    for index, layers in enumerate(zip(ours, theirs, strict=True)):
        for number, pair in enumerate(zip(*layers, strict=True)):
            mine, other = (head.in_time() for head in pair)
            heads += 1
            if mine.kept != other.kept:
                only = [
                    sorted(set(a.kept) - set(b.kept)) for a, b in ((mine, other), (other, mine))
                ]
                found = f"{len(mine.kept)} kept, {len(other.kept)} by kvpress; differing {only}"
            # Cosines and sines are float32 on both sides, so turned keys are no better than that.
            elif not torch.allclose(mine.keys, other.keys, rtol=0, atol=1e-4):
                found = f"keys differ by {(mine.keys - other.keys).abs().max():.1e}"
            # Merged values are float32 in kvpress; all others were found bit for bit.
            elif not torch.allclose(mine.values, other.values, rtol=0, atol=1e-6):
                found = f"values differ by {(mine.values - other.values).abs().max():.1e}"
            else:
                same += 1
                continue
            first = first or f"layer {index}, head {number}: {found}"
    return Agreement(heads, same, first)


# ---- the document --------------------------------------------------------------------------------

INTRODUCTION = [
    "# What kvpress keeps, and what is kept here",
    "Written by `make parity`; `make test-oracle` fails where a run would write something else.",
    "Every press and wrapper is built the same way from `hooks_impl`, from `patch_impl` and from "
    "kvpress {kvpress}, and run on the same small random models (3 layers, 4 query and 2 KV heads "
    "of 16; transformers {transformers}). Both sides have to leave the same tokens in every layer, "
    "row and KV head, and the same keys of them. What is in the caches is found by comparing "
    "values, bit for bit, with those that the model made; nothing that a press reports is used.",
    "{n_presses} of the {n_all} presses here, in {n_combinations} combinations of presses, "
    "wrappers and their arguments. kvpress has no {without}.",
    "## Same tokens",
    "`r` takes the values of the fourth column; the last two count the heads that hold the same.",
]

SAME = """\
| press | model | input | r | hooks | patches |
|---|---|---|---|--:|--:|
"""

DIFFERENT = """\
## Different on purpose

What kvpress does and what is done here, both shown by the test
([`test_differences.py`](../tests/oracle/test_differences.py)).

| | kvpress | here | why | test |
|---|---|---|---|---|
"""


def document() -> str:
    """What `docs/parity.md` should hold."""
    presses = set().union(*(case.presses for case in CASES))
    facts = {
        "kvpress": version("kvpress"),
        "transformers": version("transformers"),
        "n_presses": len(presses),
        "n_all": len(hooks_impl.PRESSES),
        "n_combinations": len({case.name for case in CASES}),
        "without": ", ".join(f"`{name}` ({what})" for name, what in NOT_IN_KVPRESS.items()),
    }
    paragraphs = (textwrap.fill(text.format(**facts), 100) for text in INTRODUCTION)
    lines = [*(f"{paragraph}\n\n" for paragraph in paragraphs), SAME]
    notes = list(dict.fromkeys(case.note for case in CASES if case.note))
    lines += [_row(case, notes) + "\n" for case in CASES]
    lines += ["\n", *(f"{_mark(note, notes)} {note}.\n\n" for note in notes)]
    lines += [DIFFERENT]
    lines += [
        f"| {d.presses} | {d.kvpress} | {d.here} | {d.why} | `{d.test}` |\n" for d in DIFFERENCES
    ]
    return "".join(lines)


def _row(case: Case, notes: list[str]) -> str:
    counts = []
    for mechanism in MECHANISMS:
        found = [agreement(case, ratio, mechanism) for ratio in case.ratios]
        counts.append(f"{sum(a.same for a in found):,} of {sum(a.heads for a in found):,}")
    note = f" {_mark(case.note, notes)}" if case.note else ""
    ratios = ", ".join(map(str, case.ratios))
    cells = f"`{case.name}`{note}", str(case.setting), str(case.run), ratios, *counts
    return f"| {' | '.join(cells)} |"


def _mark(note: str, notes: list[str]) -> str:
    return f"[{notes.index(note) + 1}]"
