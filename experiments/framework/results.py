"""The folder of a study: a CSV file per table, a PNG file per figure, and a manifest.

The manifest `run.json` says what belongs to which experiment. What the tables mean is read off them
again each time, so a report can be rebuilt, in better words or a better layout, without running
anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from matplotlib.figure import Figure
from pydantic import BaseModel, Field, StringConstraints, ValidationError

from experiments import UserError
from experiments.framework.experiment import AnyExperiment, Finding, Tables
from experiments.framework.plots import save

MANIFEST = "run.json"

Name = Annotated[str, StringConstraints(pattern=r"^\w[\w-]*$", max_length=100)]
"""Stem of a file in the folder of a study, and in no other."""


class _Entry(BaseModel):
    """What a manifest says of an experiment."""

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    error: str | None
    tables: list[Name]
    figures: dict[Name, str]
    repeat: str = ""


class _Machine(BaseModel):
    system: str
    cpu_count: int | None
    torch_threads: int
    gpu: str | None


class _Manifest(BaseModel):
    """What is read of a manifest; it may say more."""

    date: str
    commit: str | None
    seed: int
    versions: dict[str, str]
    machine: _Machine
    experiments: dict[Name, _Entry]


@dataclass(frozen=True)
class Part:
    """What a study's folder holds of one experiment.

    Attributes:
        tables: by name, as read from the CSV files.
        figures: what each shows, in words, by name.
        seconds: that it ran.
        repeat: the command that runs it again.
        error: why it failed, in one line, or None.
    """

    experiment: AnyExperiment
    tables: Tables
    figures: dict[str, str]
    seconds: float
    repeat: str
    error: str | None

    @property
    def findings(self) -> list[Finding]:
        """What was found; nothing if the experiment failed."""
        return [] if self.error else self.experiment.findings(self.tables)


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write a CSV file that `read_table` reads back as it was."""
    table.to_csv(path, index=False, lineterminator="\n")


def write_results(tables: Tables, figures: Mapping[str, Figure], folder: Path) -> None:
    """Write tables and figures into `folder`, made if absent, under their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write_table(table, folder / f"{name}.csv")
    for name, figure in figures.items():
        save(figure, folder / f"{name}.png")


def read_table(path: Path) -> pd.DataFrame:
    """A table that `write_table` wrote; only an empty cell means that a value is missing.

    Raises:
        UserError: if it is none.
    """
    options: Any = {"keep_default_na": False, "na_values": [""], "float_precision": "round_trip"}
    try:
        return pd.read_csv(path, **options)
    except ValueError as error:  # of pandas, and of texts that are none
        raise UserError(f"{path} is no table: {error}") from error


def draw(experiment: AnyExperiment, tables: Tables, folder: Path) -> dict[str, str]:
    """Draw the figures of an experiment into `folder`; returns what each shows, by name."""
    figures = experiment.figures(tables)
    for name, figure in figures.items():
        save(figure, folder / f"{name}.png")
    return {name: describe(figure) for name, figure in figures.items()}


def describe(figure: Figure) -> str:
    """What a figure shows, in words: its label (`Figure.set_label`), else its titles and axes."""
    if figure.get_label():
        return str(figure.get_label())
    titles = [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center", "right")]
    vertical = [axes.get_ylabel() for axes in figure.axes]
    horizontal = [axes.get_xlabel() for axes in figure.axes]
    drawn = " against ".join(filter(None, (_listed(vertical), _listed(horizontal))))
    named = _listed([figure.get_suptitle(), *titles])
    return ": ".join(filter(None, (named, drawn)))


def _listed(texts: Iterable[str]) -> str:
    """The texts that say something, each once, in one line."""
    return "; ".join(dict.fromkeys(" ".join(text.split()) for text in texts if text))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the study in `folder`.

    Raises:
        UserError: if there is none, or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _Manifest.model_validate(manifest, strict=True)
    except FileNotFoundError:
        raise UserError(
            f"there is no {MANIFEST} in {folder}, so it holds no study; make one with "
            f"`python -m experiments study --output {folder}`"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise UserError(f"{path} is not of a study: {place:.100}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    return manifest


def write_manifest(manifest: dict[str, Any], folder: Path) -> None:
    """Write the manifest of a study into its `folder`."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_parts(folder: Path, experiments: Sequence[AnyExperiment]) -> list[Part]:
    """What a study's folder holds, an experiment each, in the order in which they ran.

    Raises:
        UserError: if `folder` holds no study, or an experiment that is not among `experiments`.
    """
    known = {experiment.name: experiment for experiment in experiments}
    parts = []
    for name, entry in read_manifest(folder)["experiments"].items():
        if name not in known:
            raise UserError(
                f"{folder} holds results of {name!r}, which is not an experiment any more; there "
                f"are {', '.join(known)}; run the study again"
            )
        tables = {table: read_table(folder / f"{table}.csv") for table in entry["tables"]}
        part = Part(
            experiment=known[name],
            tables=tables,
            figures=entry["figures"],
            seconds=entry["seconds"],
            repeat=entry.get("repeat", f"python -m experiments {name}"),
            error=entry["error"],
        )
        _check_tables(part, folder)
        parts.append(part)
    return parts


def _check_tables(part: Part, folder: Path) -> None:
    try:
        _ = part.findings
    except LookupError as error:
        raise UserError(
            f"{folder} has no table or column {error} of {part.experiment.name!r}; run the study "
            "again"
        ) from error
