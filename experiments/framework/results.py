"""The folder of a study: a CSV file per table, an SVG file per figure, and a manifest.

The manifest says what belongs to which experiment: see `experiments.framework.manifest`. What the
tables mean is read off them again each time, so a report can be rebuilt, in better words or a
better layout, without running anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from experiments import UserError, refusing
from experiments.framework.experiment import AnyExperiment, Finding, Tables
from experiments.framework.manifest import Entry, check_names, read_manifest
from experiments.framework.plots import save


class Part(NamedTuple):
    """What a study's folder holds of one experiment: tables by name, and what is noted of it.

    Attributes:
        again: by finding, its number from other seeds, as far as the study has asked for that.
    """

    experiment: AnyExperiment
    tables: Tables
    entry: Entry
    again: Mapping[str, tuple[float, ...]] = {}

    @property
    def error(self) -> str | None:
        """Why it failed, in one line."""
        return self.entry.error

    @property
    def findings(self) -> list[Finding]:
        """What was found, by what evidence; nothing if the experiment failed."""
        if self.error:
            return []
        of_all, again = self.experiment.evidence, self.again
        return [
            replace(each, evidence=each.evidence or of_all, again=again.get(each.name, ()))
            for each in self.experiment.findings(self.tables)
        ]

    def anchor(self, finding: str) -> str:
        """Where the finding of that name stands in the report."""
        return f"{self.experiment.name}-{finding}"


def write_tables(tables: Tables, folder: Path) -> None:
    """Write tables into a folder that is there, under their names, for `read_table` to read."""
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")


def write_figures(figures: Mapping[str, Figure], folder: Path) -> None:
    """Draw figures into a folder that is there, under their names."""
    for name, figure in figures.items():
        save(figure, folder / f"{name}.svg")


def read_table(path: Path) -> pd.DataFrame:
    """A table that `write_tables` wrote; only an empty cell means that a value is missing.

    Raises:
        UserError: if there is none, or it is no table.
    """
    with (
        refusing(f"cannot read the table {path}", OSError),
        refusing(f"{path} is no table", ValueError),  # of pandas, for whatever is no CSV
    ):
        return pd.read_csv(
            path, keep_default_na=False, na_values=[""], float_precision="round_trip"
        )


def drawn(experiment: AnyExperiment, tables: Tables) -> tuple[dict[str, Figure], dict[str, str]]:
    """The figures of an experiment, and what each shows in words, both by name.

    Raises:
        ValueError: if one is not called as the experiment is.
    """
    figures = experiment.figures(tables)
    check_names(experiment.name, figures)
    return figures, {name: str(figure.get_label()) for name, figure in figures.items()}


def read_parts(folder: Path, experiments: Sequence[AnyExperiment]) -> list[Part]:
    """What a study's folder holds, an experiment each, in the order in which they ran.

    Raises:
        UserError: if `folder` holds no study, or an experiment that is not among `experiments`.
    """
    known = {experiment.name: experiment for experiment in experiments}
    parts = []
    for name, entry in read_manifest(folder).experiments.items():
        if name not in known:
            raise UserError(
                f"{folder} holds results of {name!r}, which is not an experiment any more; there "
                f"are {', '.join(known)}; run the study again"
            )
        paths = {table: folder / f"{table}.csv" for table in entry.tables}
        if entry.error:  # perhaps before all of them were written
            paths = {table: path for table, path in paths.items() if path.exists()}
        tables = {table: read_table(path) for table, path in paths.items()}
        part = Part(known[name], tables, entry)
        missing = f"{folder} lacks a table or a column of {name!r}"
        with refusing(missing, LookupError, advice="; run the study again"):
            _ = part.findings
        parts.append(part)
    for table in [part.tables["seeds"] for part in parts if "seeds" in part.tables]:
        others = table[table["shift"] != 0].groupby(["experiment", "finding"])["number"].agg(tuple)
        parts = [part._replace(again=dict(others.get(part.experiment.name, {}))) for part in parts]
    return parts
