"""The folder of a study: a CSV file per table, an SVG file per figure, and a manifest.

The manifest lists the files of each experiment: see `experiments.framework.manifest`. Findings are
not stored but computed from the tables each time, so a report can be rebuilt with other words or
another layout without running anything.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from experiments import UserError, refusing
from experiments.framework.experiment import AnyExperiment, Finding, Tables
from experiments.framework.manifest import Entry, check_names, read_manifest, write_at_once
from experiments.framework.plots import save


class Part(NamedTuple):
    """The results of one experiment in a study's folder: tables by name, and the manifest's entry.

    Attributes:
        reseeded: by finding, its numbers from other seeds, if the study has measured them.
    """

    experiment: AnyExperiment
    tables: Tables
    entry: Entry
    reseeded: Mapping[str, tuple[float, ...]] = {}

    @property
    def error(self) -> str | None:
        """Why the experiment failed, in one line; None if it did not."""
        return self.entry.error

    @property
    def findings(self) -> list[Finding]:
        """The findings with their evidence; empty if the experiment failed."""
        if self.error:
            return []
        usual, numbers = self.experiment.evidence, self.reseeded
        return [
            replace(each, evidence=each.evidence or usual, reseeded=numbers.get(each.name, ()))
            for each in self.experiment.findings(self.tables)
        ]

    def anchor(self, finding: str) -> str:
        """The anchor of a finding in the report."""
        return f"{self.experiment.name}-{finding}"


def write_tables(tables: Tables, folder: Path) -> None:
    """Write tables as CSV files, named after them, into an existing folder."""
    for name, table in tables.items():
        write_at_once(folder / f"{name}.csv", csv_of(table).encode())


def csv_of(table: pd.DataFrame) -> str:
    """A table as CSV, in which cells with line breaks or carriage returns are quoted."""
    # Before Python 3.13 a cell is quoted only if it holds a character of the line end. Splitting at
    # quotes leaves what is outside of them in every second part.
    parts = table.to_csv(index=False, lineterminator="\r\n").split('"')
    parts[::2] = [part.replace("\r\n", "\n") for part in parts[::2]]
    return '"'.join(parts)


def write_figures(figures: Mapping[str, Figure], folder: Path) -> None:
    """Write figures as SVG files, named after them, into an existing folder."""
    for name, figure in figures.items():
        save(figure, folder / f"{name}.svg")


def read_table(path: Path) -> pd.DataFrame:
    """Read a table that `write_tables` wrote; only an empty cell is a missing value.

    Raises:
        UserError: if the file cannot be read, is no table, or has no rows.
    """
    unread = f"cannot read the table {path}"
    # pandas raises a ValueError if a file is no CSV
    with refusing(unread, OSError, ValueError, advice="; run the study again"):
        table = pd.read_csv(path, keep_default_na=False, na_values="", float_precision="round_trip")
        if table.empty:
            raise ValueError("it has no rows")
    return table


Drawn = tuple[dict[str, Figure], dict[str, str]]
"""Figures and their descriptions, both by name."""


def drawn(experiment: AnyExperiment, tables: Tables) -> Drawn:
    """The figures of an experiment, and their descriptions, both by name.

    Raises:
        ValueError: if a figure's name does not start with the experiment's.
        Exception: of any type, if the tables lack something that the report shows.
    """
    experiment.markdown(tables)
    experiment.contrasts(tables)
    figures = experiment.figures(tables)
    check_names(experiment.name, figures)
    return figures, {name: str(figure.get_label()) for name, figure in figures.items()}


def readable(part: Part, folder: Path) -> AbstractContextManager[None]:
    """Turn what goes wrong with the tables of an experiment into a `UserError`."""
    missing = f"{folder} lacks a table, a column or values of {part.experiment.name!r}"
    return refusing(missing, Exception, advice="; run the study again")


def read_parts(folder: Path, experiments: Sequence[AnyExperiment]) -> list[Part]:
    """The results in a study's folder, by experiment, in the order of the manifest.

    Raises:
        UserError: if `folder` holds no study, results of an experiment that is not among
            `experiments`, or lacks a table, a column or values.
    """
    known = {experiment.name: experiment for experiment in experiments}
    parts = []
    for name, entry in read_manifest(folder).experiments.items():
        if name not in known:
            raise UserError(
                f"{folder} holds results of {name!r}, which is not an experiment any more; there "
                f"are {', '.join(known)}; run the study again"
            )
        tables: Tables = {}
        for stem in entry.tables:
            # A failed experiment may have left no table, or one without rows.
            with suppress(UserError) if entry.error else nullcontext():
                tables[stem] = read_table(folder / f"{stem}.csv")
        part = Part(known[name], tables, entry)
        with readable(part, folder):
            _ = part.findings
        parts.append(part)
    for table in [part.tables["seeds"] for part in parts if "seeds" in part.tables]:
        parts = [part._replace(reseeded=_reseeded(part, table)) for part in parts]
    return parts


def _reseeded(part: Part, seeds: pd.DataFrame) -> dict[str, tuple[float, ...]]:
    """Numbers from other seeds, of findings that were found with the study's seed there, too.

    A small study has other grids than the repetitions.
    """
    found = {}
    for each in part.findings:
        of_part = (seeds["experiment"] == part.experiment.name) & (seeds["finding"] == each.name)
        numbers = seeds[of_part].set_index("shift")["number"]
        if numbers.get(0) == each.number:
            found[each.name] = tuple(numbers.drop(0))
    return found
