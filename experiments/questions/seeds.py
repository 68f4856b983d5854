"""Which findings about a model's answers hold on contexts drawn from other seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import pandas as pd
import typer
from rich.progress import Progress

from experiments import UserError, load_experiments
from experiments.framework.experiment import AnyExperiment, Evidence, Experiment, Finding, Tables
from experiments.framework.frames import wide_table
from experiments.framework.intervals import METHOD, bracketed
from experiments.framework.options import at_least, one_of, several
from experiments.framework.tables import ResultTable

_KEY = ["experiment", "finding"]

_DRAWING = ("headwise", "quality", "error", "evaluate")
"""Experiments that draw contexts for a shipped model: those with `redrawn` options."""


@dataclass(frozen=True)
class Options:
    """Which experiments are repeated, and from which seeds."""

    experiment: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Experiment to repeat on contexts from other seeds. Repeatable.",
            show_default="all that draw contexts",
            callback=one_of(_DRAWING),
        ),
    ] = ()
    shift: Annotated[
        tuple[int, ...],
        several(
            int, "Number added to the seed of an experiment; 0 repeats the study's.", at_least(0)
        ),
    ] = (0, 1, 2)
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Contexts per experiment.", show_default="as in the study"),
    ] = None


def again(experiment: AnyExperiment, options: Options, progress: Progress) -> list[dict[str, Any]]:
    """The findings of one experiment that rest on a model's answers, from each seed."""
    rows, study = [], cast("Any", experiment.redrawn)
    for shift in options.shift:
        drawn = replace(study, seed=study.seed + shift, samples=options.samples or study.samples)
        for finding in experiment.findings(experiment.measure(drawn, progress)):
            if (finding.evidence or experiment.evidence) is Evidence.MODEL:
                low, high = finding.interval
                row = {"experiment": experiment.name, "finding": finding.name, "seed": drawn.seed}
                row |= {"shift": shift, "number": finding.number, "low": low, "high": high}
                rows.append(row | {"text": finding.text})
    return rows


def holding(table: pd.DataFrame) -> pd.Series[str]:
    """Whether every number of a finding is within its 95% interval from the first seed.

    Returns:
        "yes" or "no" by experiment and finding; "-" if the finding has no interval.
    """
    first, by_finding = table.drop_duplicates(_KEY).set_index(_KEY), table.groupby(_KEY, sort=False)
    least, most = by_finding["number"].min(), by_finding["number"].max()
    inside = (least >= first["low"]) & (most <= first["high"])
    return inside.map({True: "yes", False: "no"}).where(first["low"].notna(), "-").rename("holds")


class Seeds(Experiment[Options]):
    """Repeat experiments on contexts from other seeds, and compare their findings.

    Which findings about answers and errors stay within their interval when the contexts are drawn
    from other seeds?

    Every experiment that draws contexts for a shipped model is run from its own seed and from two
    others, on the part of its grid that its findings are computed from. A finding holds if its
    number from every seed is within the 95% interval from the study's seed. That is strict: if only
    chance differs, a number from another seed is within it in about 83 of 100 cases, and those from
    two seeds are in about 72. Where a finding is about the best press, that of another seed may be
    another press. Only contexts are redrawn: the weights are the same, so this does not show how
    findings vary between models, which may differ more.
    """

    name = "seeds"
    title = "Other seeds"
    evidence = Evidence.MODEL
    full = Options()
    quick = Options(experiment=("headwise",), shift=(0, 1), samples=6)
    left_out = "it runs the experiments on the shipped models again"

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Run the experiments from each seed.

        Returns:
            `seeds`: a row per finding and seed: `experiment`, `finding`, `seed`, its difference
            from the study's seed (`shift`), the `number` of the finding, its interval (`low`,
            `high`), and its `text`.
        """
        if len(options.shift) < 2:
            raise UserError(f"--shift {options.shift[0]} compares nothing; give two, such as 0,1")
        chosen = [one for one in load_experiments() if one.name in (options.experiment or _DRAWING)]
        rows = [row for one in chosen for row in again(one, options, progress)]
        return {self.name: pd.DataFrame(rows)}

    def findings(self, tables: Tables) -> list[Finding]:
        holds = holding(tables["seeds"])
        n, n_known = (holds == "yes").sum(), (holds != "-").sum()
        text = f"With other seeds, **{n}** of {n_known} findings with an interval stay within it."
        return [Finding("hold", text)]

    def views(self, tables: Tables) -> list[ResultTable]:
        rows = tables["seeds"].join(holding(tables["seeds"]), on=_KEY)
        rows["drawn"] = rows["shift"].map(lambda n: f"seed + {n}" if n else "the study's seed")
        cells = [bracketed(row, "number", "g") for row in rows.to_dict("records")]
        note = (
            f"The number of each finding, with {METHOD} over contexts where available, and whether "
            "the numbers from other seeds are within the interval of the first (-: no interval)."
        )
        return [wide_table(note, rows, [*_KEY, "holds"], "drawn", cells)]


EXPERIMENT = Seeds()
