"""A folder of results: what is finished, and of one set-up.

```
setup.json            the set-up
cells/KEY.json        a finished cell with its predictions
results.csv           a row per finished cell
predictions.csv       a row per question of them all
```

Every file is written at once or not at all, so that a process that dies, or a disk that is full,
leaves no half of a cell. The set-up and the cells are read again; tables are made from them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel

from experiments import UserError
from experiments.answers.cells import Cell
from experiments.framework.intervals import mean_interval
from experiments.framework.manifest import write_at_once

SETUP, CELLS = "setup.json", "cells"


class Prediction(BaseModel):
    """The answer to one question of a cell."""

    sample: int
    context: str
    question: str
    answers: list[str]
    prediction: str
    metric: str
    score: float | None
    also: dict[str, float] = {}


class Record(BaseModel):
    """A finished cell."""

    key: str
    dataset: str
    press: str
    ratio: float | None
    budget: int | None
    mechanism: str
    score: float | None
    low: float | None
    high: float | None
    questions: int
    evicted: float | None = None
    also: str | None
    press_text: str
    seconds: float
    predictions: list[Prediction]


class Store:
    """The results in one folder, which is made if it is not there."""

    def __init__(self, folder: Path, setup: Mapping[str, Any], file_format: str = "csv") -> None:
        """Open or begin a folder.

        Args:
            setup: what all its cells have in common; "made_with" may differ.
            file_format: of new tables, "csv" or "parquet".

        Raises:
            UserError: if the folder holds results of another set-up or files of somebody else that
                would have to give way, if it cannot be written, or the format cannot be had.
        """
        if file_format == "parquet" and find_spec("pyarrow") is None:
            raise UserError(
                "parquet needs pyarrow, which is not installed; write csv, or "
                'pip install "hook-or-patch[evaluate]"'
            )
        self.folder = folder
        self.tables = [f"{name}.{file_format}" for name in ("results", "predictions")]
        content = json.dumps(setup, indent=2, default=str)
        if os.path.lexists(folder / SETUP):
            self._check_setup(json.loads(content))
            return
        for name in (CELLS, *self.tables):
            if os.path.lexists(folder / name):
                raise UserError(
                    f"{folder} has {name}, which no sweep has written there and which would be "
                    "lost; give another --output"
                )
        self._write(SETUP, f"{content}\n".encode())

    def _check_setup(self, setup: dict[str, Any]) -> None:
        path = self.folder / SETUP
        try:
            former = dict(json.loads(path.read_bytes()).items())
        except (OSError, AttributeError, ValueError, RecursionError) as error:
            raise UserError(f"{path} is no file of a sweep; give another --output") from error
        names = sorted((set(former) | set(setup)) - {"made_with"})
        differing = [n for n in names if former.get(n) != setup.get(n)]
        if differing:
            said = "; ".join(f"{n} was {former.get(n)!r}, is {setup.get(n)!r}" for n in differing)
            raise UserError(
                f"{self.folder} holds results of another set-up, with which new ones cannot be "
                f"compared: {said}; give another --output"
            )

    def _write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_at_once(path, content)
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror}; what is finished is kept, so see to it "
                "and give the same command again, or another --output"
            ) from error

    # ---- cells -----------------------------------------------------------------------------------

    def _records(self) -> list[Record]:
        """Every finished cell, by its key.

        Raises:
            UserError: if one cannot be read.
        """
        found = []
        for path in (self.folder / CELLS).glob("*.json"):
            try:
                found.append(Record.model_validate_json(path.read_bytes()))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{path} is damaged; remove it, and its cell is run again, or give another "
                    "--output"
                ) from error
        return sorted(found, key=lambda record: record.key)

    def finished(self) -> set[str]:
        """The keys of all cells that are there."""
        return {record.key for record in self._records()}

    def save(self, cell: Cell, rows: list[dict[str, Any]], about: Mapping[str, Any]) -> None:
        """Write down a cell that is finished.

        Args:
            rows: of `run_cell`.
            about: what else to keep of it: "evicted", "press_text", "seconds".

        Raises:
            UserError: if it cannot be written, or another sweep has written it meanwhile.
        """
        name = f"{CELLS}/{hashlib.sha256(cell.key.encode()).hexdigest()[:16]}.json"
        if (self.folder / name).exists():
            raise UserError(
                f"another sweep is writing to {self.folder}; wait for it to finish and give the "
                "same command again, or give another --output"
            )
        record = {"key": cell.key, **cell._asdict(), **summary_of(rows), **about}
        content = json.dumps({**record, "predictions": rows}, ensure_ascii=False)
        self._write(name, content.encode(errors="replace"))  # halves of a character

    # ---- all of them -----------------------------------------------------------------------------

    def results(self, cells: Iterable[Cell] = ()) -> pd.DataFrame:
        """A row per finished cell: those of `cells` in their order, then all others."""
        order = {cell.key: place for place, cell in enumerate(cells)}
        records = sorted(self._records(), key=lambda record: order.get(record.key, len(order)))
        columns = [name for name in Record.model_fields if name not in ("key", "predictions")]
        return _table((record.model_dump() for record in records), columns)

    def predictions(self) -> pd.DataFrame:
        """A row per question of every finished cell, with what the cell is."""
        cell = ("dataset", "press", "ratio", "budget", "mechanism", "press_text")
        rows = (
            record.model_dump(include=set(cell))
            | row.model_dump()
            | {"answers": _json(row.answers), "also": _json(row.also)}
            for record in self._records()
            for row in record.predictions
        )
        return _table(rows, (*cell, *Prediction.model_fields))

    def write_tables(self, cells: Iterable[Cell] = ()) -> pd.DataFrame:
        """Write the two tables of all cells; returns that of results."""
        results = self.results(cells)
        for name, table in zip(self.tables, (results, self.predictions()), strict=True):
            if name.endswith(".parquet"):
                self._write(name, table.to_parquet(index=False))
            else:
                self._write(name, table.to_csv(index=False, lineterminator="\n").encode())
        return results


def _table(rows: Iterable[dict[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=list(columns))
    return table.astype({"budget": "Int64"})  # numbers, though some are missing


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Score of a cell with its interval over contexts, and other metrics on average.

    Scores are None where nobody knows the answers.
    """
    known = [row for row in rows if row["score"] is not None]
    scores = [row["score"] for row in known]
    low, high = mean_interval(scores, [row["context"] for row in known])
    others = [row["also"] for row in rows if row.get("also")]
    means = {name: sum(row[name] for row in others) / len(others) for name in (others or [{}])[0]}
    return {
        "score": sum(scores) / len(scores) if scores else None,
        "low": low,
        "high": high,
        "questions": len(rows),
        "also": _json(means),
    }


def _json(value: Any) -> str | None:
    return json.dumps(value, ensure_ascii=False) if value else None
