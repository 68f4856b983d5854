"""Comparing with kvpress, and writing down what came out."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import kvpress
import torch

import hooks_impl
import patch_impl
from tests.oracle.cases import CASES, LLAMA, Case
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

DOCUMENTED = """\
# Parity with kvpress

{n_presses} of the {n_all} presses keep the same tokens as in kvpress {kvpress}, and the same keys,
in every layer, row and KV head of {n_combinations} combinations of presses, arguments, models and
inputs. What differs on purpose is [below](#different-on-purpose).

kvpress has no {without}.

Every press is built from `hooks_impl`, from `patch_impl` and from kvpress, and run on the same
small random models (transformers {transformers}). What a cache holds is found by comparing its
values, bit for bit, with those that the model made; nothing that a press reports is used. The
arguments are in [`cases.py`](../tests/oracle/cases.py). `make parity` writes this page, and
`make test-oracle` fails where a run would write something else.

## Same tokens

*With*: presses inside it, models and precisions other than Llama in float64. The last two columns
count the KV heads that hold the same.

| press | runs | with | hooks | patches |
|---|--:|---|--:|--:|
{same}

{notes}

## Different on purpose

Each row is shown, on both sides, by a test of
[`test_differences.py`](../tests/oracle/test_differences.py).

| | kvpress | here |
|---|---|---|
{different}
"""


def document() -> str:
    """What `docs/parity.md` should hold."""
    presses = set().union(*(case.presses for case in CASES))
    notes = list(dict.fromkeys(case.note for case in CASES if case.note))
    by_press: dict[str, list[Case]] = {}
    for case in CASES:
        by_press.setdefault(case.name.partition("(")[0], []).append(case)
    return DOCUMENTED.format(
        kvpress=version("kvpress"),
        transformers=version("transformers"),
        n_presses=len(presses),
        n_all=len(hooks_impl.PRESSES),
        n_combinations=len(CASES),
        without=", ".join(f"`{name}` ({what})" for name, what in NOT_IN_KVPRESS.items()),
        same="\n".join(_row(name, cases, notes) for name, cases in by_press.items()),
        notes="\n".join(f"{number}. {note}." for number, note in enumerate(notes, 1)),
        different="\n".join(f"| {d.presses} | {d.kvpress} | {d.here} |" for d in DIFFERENCES),
    )


def _row(name: str, cases: list[Case], notes: list[str]) -> str:
    counts = []
    for mechanism in MECHANISMS:
        found = [agreement(case, r, mechanism) for case in cases for r in case.ratios]
        counts.append(f"{sum(a.same for a in found):,} of {sum(a.heads for a in found):,}")
    inside = sorted(set().union(*(case.presses for case in cases)) - {name})
    settings = dict.fromkeys(_setting(case) for case in cases if case.setting != LLAMA)
    marks = sorted({notes.index(case.note) + 1 for case in cases if case.note})
    mark = f" [{', '.join(map(str, marks))}]" if marks else ""
    used = ", ".join([*(press.removesuffix("Press") for press in inside), *settings])
    runs = str(sum(len(case.ratios) for case in cases))
    return f"| {' | '.join([f'`{name}`{mark}', runs, used, *counts])} |"


def _setting(case: Case) -> str:
    """What differs from Llama in float64."""
    return str(case.setting).replace(", float64", "").removeprefix("llama, ")
