"""docs/parity.md is what a run would write."""

from importlib.metadata import version
from pathlib import Path

import hooks_impl
from tests.oracle.cases import CASES, LLAMA, MECHANISMS, Case
from tests.oracle.differences import DIFFERENCES, NOT_IN_KVPRESS
from tests.oracle.parity import agreement

DOCUMENTED = Path(__file__).with_name("parity.md").read_text(encoding="utf-8")


def document():
    """What `docs/parity.md` should hold."""
    presses = set().union(*(case.presses for case in CASES))
    notes = list(dict.fromkeys(case.note for case in CASES if case.note))
    by_press: dict[str, list[Case]] = {}
    for case in CASES:
        by_press.setdefault(case.press.partition("(")[0], []).append(case)
    return DOCUMENTED.format(
        kvpress=version("kvpress"),
        transformers=version("transformers"),
        n_presses=len(presses),
        n_all=len(hooks_impl.PRESSES),
        n_combinations=len(CASES),
        without=", ".join(f"`{name}` ({what})" for name, what in NOT_IN_KVPRESS.items()),
        same="\n".join(_row(name, cases, notes) for name, cases in by_press.items()),
        notes="\n".join(f"{number}. {note}." for number, note in enumerate(notes, 1)),
        different="\n".join(
            f"| {d['presses']} | {d['kvpress']} | {d['here']} |" for d in DIFFERENCES
        ),
    )


def _row(name, cases, notes):
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


def _setting(case):
    """What differs from Llama in float64."""
    return str(case.setting).replace(", float64", "").removeprefix("llama, ")


def test_document(request):
    path = Path(__file__).parents[2] / "docs" / "parity.md"
    if request.config.getoption("--write-parity"):
        path.write_text(document())
    assert path.read_text() == document(), "run `make parity`"
