"""Which findings about answers hold for contexts drawn from other seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import pandas as pd
import typer
from rich.progress import Progress

from experiments import EXPERIMENTS, load_experiments
from experiments.framework.experiment import AnyExperiment, Evidence, Experiment, Finding, Tables
from experiments.framework.frames import wide_table
from experiments.framework.intervals import METHOD, bracketed
from experiments.framework.options import one_of, several
from experiments.framework.tables import ResultTable

_KEY = ["experiment", "finding"]


@dataclass(frozen=True)
class Options:
    """What is drawn again."""

    experiment: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Experiment whose contexts are drawn again. Repeatable.",
            show_default="all that draw contexts",
            callback=one_of(EXPERIMENTS),
        ),
    ] = ()
    shift: Annotated[
        tuple[int, ...],
        several(int, "What is added to the seed of each experiment; 0 draws what the study does."),
    ] = (0, 1, 2)
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Contexts to ask about.", show_default="as in the study"),
    ] = None


def again(experiment: AnyExperiment, options: Options, progress: Progress) -> list[dict[str, Any]]:
    """The findings about answers of one experiment, from each seed."""
    rows, study = [], cast("Any", experiment.redrawn)
    for shift in options.shift:
        told = replace(study, seed=study.seed + shift, samples=options.samples or study.samples)
        for finding in experiment.findings(experiment.measure(told, progress)):
            if (finding.evidence or experiment.evidence) is Evidence.MODEL:
                low, high = finding.interval
                rows.append(
                    {"experiment": experiment.name, "finding": finding.name, "seed": told.seed}
                    | {"shift": shift, "number": finding.number, "low": low, "high": high}
                    | {"text": finding.text}
                )
    return rows


def holding(table: pd.DataFrame) -> pd.Series[str]:
    """Whether the numbers of each finding lie in its interval from the first seed.

    Returns:
        By experiment and finding "yes" or "no"; "-" where it has no interval.
    """
    first, by_finding = table.drop_duplicates(_KEY).set_index(_KEY), table.groupby(_KEY, sort=False)
    least, most = by_finding["number"].min(), by_finding["number"].max()
    inside = (least >= first["low"]) & (most <= first["high"])
    return inside.map({True: "yes", False: "no"}).where(first["low"].notna(), "-").rename("holds")


class Seeds(Experiment[Options]):
    """Measure findings about answers again, on contexts drawn from other seeds.

    Which findings about answers and errors stay as they are where contexts are drawn from other
    seeds?

    Every experiment that asks a shipped model about contexts is run from its own seed and from two
    others, on the part of its grid that its findings rest on. A finding holds if its number from
    each seed lies in the interval from the first. Weights stay as they are: other models may
    differ by more than other contexts do.
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
            `seeds`: a row per finding and seed: `experiment`, `finding`, `seed`, what that differs
            by from the study's (`shift`), the `number` of the finding, its interval, `low` and
            `high`, and its `text`.
        """
        names = options.experiment or EXPERIMENTS
        chosen = [one for one in load_experiments() if one.redrawn and one.name in names]
        rows = [row for one in chosen for row in again(one, options, progress)]
        return {self.name: pd.DataFrame(rows)}

    def findings(self, tables: Tables) -> list[Finding]:
        holds = holding(tables["seeds"])
        n, n_known = (holds == "yes").sum(), (holds != "-").sum()
        text = f"From other seeds **{n}** of {n_known} findings with an interval stay in it."
        return [Finding("hold", text)]

    def views(self, tables: Tables) -> list[ResultTable]:
        rows = tables["seeds"].join(holding(tables["seeds"]), on=_KEY)
        rows["drawn"] = rows["shift"].map(lambda n: f"seed + {n}" if n else "the study's seed")
        cells = [bracketed(row, "number", "g") for row in rows.to_dict("records")]
        note = (
            f"The number of each finding, with {METHOD} over contexts where it has them, and "
            "whether those from other seeds lie in the first interval (-: it has none)."
        )
        return [wide_table(note, rows, [*_KEY, "holds"], "drawn", cells)]


EXPERIMENT = Seeds()
