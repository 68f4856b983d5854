"""Which findings about answers hold for contexts drawn from other seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import pandas as pd
import typer
from rich.progress import Progress

from experiments import EXPERIMENTS, load_experiments
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import AnyExperiment, Experiment, Finding, Tables
from experiments.framework.frames import wide_table
from experiments.framework.intervals import METHOD, bracketed
from experiments.framework.options import one_of, several
from experiments.framework.tables import ResultTable


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
    n_samples = options.samples or study.samples
    for shift in options.shift:
        told = replace(study, seed=study.seed + shift, samples=n_samples)
        for finding in experiment.findings(experiment.measure(told, progress)):
            if (finding.evidence or experiment.evidence) is Evidence.MODEL:
                low, high = finding.interval
                rows.append(
                    {"experiment": experiment.name, "finding": finding.name, "seed": told.seed}
                    | {"shift": shift, "number": finding.number, "low": low, "high": high}
                    | {"text": finding.text}
                )
    return rows


def moves(table: pd.DataFrame) -> pd.DataFrame:
    """How far each finding moves.

    Returns:
        A row per finding: `experiment`, `finding`, `low` and `high`, the interval from the first
        seed; `least` and `most`, of its number from all seeds; `holds`, whether these lie in the
        interval, or are alike; None where there is no interval and they are not.
    """
    key = ["experiment", "finding"]
    numbers = table.groupby(key, sort=False)["number"].agg(least="min", most="max").reset_index()
    found = table.drop_duplicates(key)[[*key, "low", "high"]].merge(numbers, on=key)
    alike = found["least"] == found["most"]
    inside = (found["least"] >= found["low"]) & (found["most"] <= found["high"])
    known = found["low"].notna() | alike
    return found.assign(holds=(alike | inside).astype(object).where(known, None))


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
        asked = [one for one in load_experiments() if one.redrawn is not None]
        chosen = [one for one in asked if not options.experiment or one.name in options.experiment]
        return {
            "seeds": pd.DataFrame(row for one in chosen for row in again(one, options, progress))
        }

    def findings(self, tables: Tables) -> list[Finding]:
        moved = moves(tables["seeds"])
        known = moved[moved["holds"].notna()]
        gone = [f"{row.experiment}-{row.finding}" for row in known.itertuples() if not row.holds]
        text = (
            f"From other seeds **{len(known) - len(gone)}** of {len(known)} findings about answers "
            f"stay within their intervals{_listed(gone)}."
        )
        return [Finding("hold", text)]

    def views(self, tables: Tables) -> list[ResultTable]:
        key = ["experiment", "finding"]
        rows = tables["seeds"].merge(moves(tables["seeds"])[[*key, "holds"]], on=key)
        rows["holds"] = rows["holds"].map({True: "yes", False: "no"}).fillna("-")
        rows["drawn"] = rows["shift"].map(lambda n: f"seed + {n}" if n else "the study's seed")
        cells = [bracketed(row, "number", "g") for row in rows.to_dict("records")]
        note = (
            f"The number of each finding, with {METHOD} over contexts where it has them, and "
            "whether those from other seeds lie in the first interval (-: it has none)."
        )
        return [wide_table(note, rows, [*key, "holds"], "drawn", cells)]


def _listed(names: Sequence[str]) -> str:
    return f", all but {', '.join(names)}" if names else ""


EXPERIMENT = Seeds()
