"""On which decoders presses are correct, by mechanism, and why the others are refused."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments import UserError
from experiments.framework.experiment import Evidence, Experiment, Finding, Tables
from experiments.framework.frames import heat_maps
from experiments.framework.options import checking, one_of, several
from experiments.framework.own_model import SMALL, LeftOutError, OwnModel, Planned
from experiments.framework.shared import OLDEST, or_left_out, printed_by
from experiments.framework.tables import ResultTable
from experiments.framework.wording import sentences
from experiments.questions.architectures.cells import SUBJECTS
from experiments.questions.architectures.decoders import DATA, decoders
from experiments.questions.architectures.sweep import condensed, measure, why

_finding = sentences(__file__)
REPRESENTATIVES = tuple(filter(decoders().__contains__, DATA["representatives"]))
"""One type of every structural kind; `docs/architectures.md` describes the kinds."""

BOTH, PATCH, HOOK, NEITHER, WRONG = "both", "patch alone", "hook alone", "refused", "wrong"
"""The mechanisms by which a press is right; or refused when the scope opens; or a failure."""

_REACHES = {
    ("right", "right"): BOTH,
    ("refused at open", "right"): PATCH,
    ("right", "refused at open"): HOOK,
    ("refused at open", "refused at open"): NEITHER,
}
"""Reach by the worst outcomes of hook and patch; any other pair is `WRONG`."""

_KNOWN = checking(decoders().__contains__, "{!r} is no decoder of transformers, such as llama")


@dataclass(frozen=True)
class Options:
    """Which decoders and attention implementations to sweep."""

    type: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Model type or variant; repeatable.", show_default="all", callback=_KNOWN
        ),
    ] = ()
    attention: Annotated[
        tuple[str, ...], several(str, "Attention implementation.", one_of(("eager", "sdpa")))
    ] = ("eager", "sdpa")
    oldest: Annotated[
        bool, typer.Option(help="Also sweep with the oldest supported transformers, if installed.")
    ] = True


class Architectures(Experiment[Options]):
    """Sweep the decoders of the installed transformers with tiny random weights.

    On which decoders do presses give the right result, by hook and by patch, and why not on the
    others?

    The causal, image-text and encoder-decoder types of the installed transformers that run on
    text alone are built small, with random weights; ten are also run with an image in the
    context. On each, seven presses are swept, one for every kind of input that presses need: the
    tokens that a press keeps and the logits that follow are compared with a run over the full
    cache in which the evicted tokens are masked, by code that shares nothing with the presses.
    Where a press cannot be right, it has to be refused when its scope opens: such a refusal is a
    case that is not wrong, and so is a right run in which nothing is evicted. A type of which
    variants are run, or that is also run with an image, counts once; all of its runs have to be
    right. Long contexts and trained weights are not tested.
    """

    name = "architectures"
    title = "Which decoders presses work on"
    evidence = Evidence.REFERENCE
    full = Options()
    quick = Options(type=REPRESENTATIVES, oldest=False)

    def on(self, own: OwnModel) -> Planned[Options]:
        if own.model_type not in decoders():
            raise LeftOutError(f"it builds no small model of the type {own.model_type}")
        return Planned(Options(type=(own.model_type,), oldest=False), seconds=5, note=SMALL)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Test every press, by both mechanisms, on every decoder, under all conditions.

        Returns:
            `architectures`: see `condensed`; and `architectures_oldest`, the same with sdpa and the
            oldest supported transformers, if that is installed.
        """
        names = options.type or tuple(decoders())
        task = progress.add_task(self.name, total=len(names))
        rows = measure(
            names,
            choose=lambda cell: cell.attention in options.attention,
            progress=lambda name: progress.advance(task),
        )
        tables = {"architectures": condensed(rows)}
        if options.oldest and OLDEST.exists():
            oldest = or_left_out(progress, "oldest transformers", _with_oldest, options.type)
            tables |= {} if oldest is None else {"architectures_oldest": oldest}
        return tables

    def findings(self, tables: Tables) -> list[Finding]:
        return [_found(name, table) for name, table in tables.items()]

    def views(self, tables: Tables) -> list[ResultTable]:
        table = tables["architectures"]
        left_out = ", ".join(f"`{name}`" for name in table["type"][table["cells"] == 0].unique())
        note = f"Not tested, as they do not run on text alone or in small: {left_out or 'none'}."
        return [limits(table), ResultTable(note)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {"architectures": figure(tables["architectures"])}

    def passed(self, tables: Tables) -> bool:
        return not any(table["bad"].any() for table in tables.values())


# ---- reading the table ---------------------------------------------------------------------------


def reach(table: pd.DataFrame) -> pd.DataFrame:
    """The reach of each press on each type: columns `type`, `press`, `reach` and `reason`.

    Types that could not be tested have no rows.
    """
    runs = table[table["cells"] > 0]
    reached = [_REACHES.get(both, WRONG) for both in zip(runs["hook"], runs["patch"], strict=True)]
    return runs[["type", "press"]].assign(reach=reached, reason=runs["reason"].fillna(""))


def limits(table: pd.DataFrame) -> ResultTable:
    """Decoders on which some press is refused by some mechanism, with the presses and reasons."""
    reached = reach(table)
    by_limit: dict[tuple[str, str], list[str]] = {}
    for kind, group in reached[reached["reach"] != BOTH].groupby("type"):
        reasons = "; ".join(dict.fromkeys(why(reason) for reason in group["reason"] if reason))
        one_side = group["reach"].map({PATCH: "hooks", HOOK: "patches"})
        sides = ", ".join(dict.fromkeys(one_side.dropna()))
        refused = _presses(group["press"][one_side.isna()])
        by_one = f"by {sides}: {_presses(group['press'][one_side.notna()])}" if sides else ""
        key = reasons, "; ".join(filter(None, [refused, by_one]))
        by_limit.setdefault(key, []).append(f"`{kind}`")
    ordered = sorted(by_limit.items(), key=lambda pair: -len(pair[1]))
    rows = [[*key, ", ".join(kinds)] for key, kinds in ordered]
    note = "Presses refused when their scope opens, before anything is installed, and why."
    return ResultTable(note, ["why", "refused", "decoders"], rows, left=None)


def _presses(refused: pd.Series) -> str:
    if len(refused) == len(SUBJECTS):
        return "every press"
    return ", ".join(press for press in refused if press != "nothing evicted")


def figure(table: pd.DataFrame) -> Figure:
    """Number of decoders by press and by the mechanisms that are right on them."""
    reached = reach(table)
    counts = pd.crosstab(reached["press"], reached["reach"]).reindex(reached["press"].unique())
    title = f"{reached['type'].nunique()} decoders and variants"
    label = "Decoders and variants by press (rows) and the mechanisms that are right on them"
    return heat_maps({title: counts}, label, "{:.0f}")


def _found(name: str, table: pd.DataFrame) -> Finding:
    """On how many decoders presses are right, with the installed or the oldest transformers."""
    reached, wrong = reach(table), int(table["bad"].sum())
    presses = reached[reached["press"] != "nothing evicted"]
    kinds = presses["type"].str.split(" (", regex=False).str[0]
    right = (presses["reach"] == BOTH).groupby([kinds, presses["press"]]).all().unstack()
    counts = {
        "n": len(SUBJECTS) - 1,  # without "nothing evicted"; the table may hold failed processes
        "every": right.all(axis=1).sum(),
        "some": right.any(axis=1).sum(),
        "of": len(right),
        "wrong": wrong,
        "cells": table["cells"].sum(),
    }
    if name != "architectures":
        return _finding("oldest", **counts)
    return _finding("reach", "breaks" if wrong else "works", **counts)


# ---- the oldest transformers ---------------------------------------------------------------------


def _with_oldest(types: tuple[str, ...]) -> pd.DataFrame:
    """Run the sweep in the environment with the oldest transformers.

    Raises:
        UserError: if the sweep fails.
    """
    with TemporaryDirectory() as folder:
        only = (part for kind in types for part in ("--type", kind))
        what = ["architectures", "--no-oldest", "--attention", "sdpa", *only, "--output", folder]
        found = Path(folder) / "architectures.csv"
        try:
            printed_by(OLDEST, "experiments", *what, otherwise="; try --no-oldest")
        except UserError:
            if not found.exists():  # else presses failed, as the table says
                raise
        return pd.read_csv(found, keep_default_na=False)


EXPERIMENT = Architectures()
