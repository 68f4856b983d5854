"""A folder of results: what is finished, and of one set-up.

```
sweep.sqlite          the set-up, and every finished cell with its predictions
setup.json            the set-up, to be read
results.csv           a row per cell that is finished
predictions.csv       a row per question of them all
```

A cell is one transaction, so that a process that dies, or a disk that is full, leaves no half of
one. The database alone is read again; the other files are written from it.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pandas as pd

from experiments import UserError
from experiments.answers.cells import Cell
from experiments.framework.intervals import wilson

DATABASE, SETUP = "sweep.sqlite", "setup.json"

_APPLICATION = 0x486F5061  # tells the database from those of other programs
_SCHEMA = f"""
    PRAGMA application_id = {_APPLICATION};
    CREATE TABLE setup (content TEXT);
    CREATE TABLE written (file TEXT PRIMARY KEY);
    CREATE TABLE cells (
        id INTEGER PRIMARY KEY, key TEXT UNIQUE, dataset TEXT, press TEXT, ratio REAL,
        budget INTEGER, mechanism TEXT, score REAL, low REAL, high REAL, questions INTEGER,
        evicted REAL, also TEXT, press_text TEXT, seconds REAL
    );
    CREATE TABLE predictions (
        cell INTEGER REFERENCES cells, sample INTEGER, context TEXT, question TEXT, answers TEXT,
        prediction TEXT, metric TEXT, score REAL, also TEXT
    );
"""


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
        content = json.dumps(setup, indent=2, ensure_ascii=False, default=str)
        if not os.path.lexists(folder / DATABASE):
            self._begin(content)
        former, written = self._opened()
        self._check_foreign(self.tables, written)
        self._check_setup(former, json.loads(content))
        if not (folder / SETUP).exists():
            self._write(SETUP, f"{former}\n".encode())

    def _begin(self, setup: str) -> None:
        self._check_foreign([f"{DATABASE}-journal", SETUP, *self.tables], written=())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {self.folder}: {error.strerror}") from error
        with self._database() as database:
            database.executescript(f"BEGIN; {_SCHEMA}")
            database.execute("INSERT INTO setup VALUES (?)", (setup,))

    def _opened(self) -> tuple[Any, list[Any]]:
        """The set-up of a database that is there, and the names of the files written from it."""
        path = self.folder / DATABASE
        if path.is_symlink() or not path.is_file():
            raise UserError(f"{path} is no file of a sweep; give another --output")
        with self._database() as database:
            (application,) = database.execute("PRAGMA application_id").fetchone()
            if application != _APPLICATION:
                raise UserError(f"{path} is a database of something else; give another --output")
            (sound,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise UserError(f"{path} is damaged ({sound}); give another --output")
            (setup,) = database.execute("SELECT content FROM setup").fetchone() or ("",)
            return setup, [name for (name,) in database.execute("SELECT file FROM written")]

    def _check_setup(self, content: Any, setup: dict[str, Any]) -> None:
        try:
            former = dict(json.loads(content).items())
        except (AttributeError, TypeError, ValueError):
            raise UserError(
                f"{self.folder / DATABASE} does not say what its results are of; give another "
                "--output"
            ) from None
        names = sorted((set(former) | set(setup)) - {"made_with"})
        differing = [n for n in names if former.get(n) != setup.get(n)]
        if differing:
            said = "; ".join(f"{n} was {former.get(n)!r}, is {setup.get(n)!r}" for n in differing)
            raise UserError(
                f"{self.folder} holds results of another set-up, with which new ones cannot be "
                f"compared: {said}; give another --output"
            )

    def _check_foreign(self, names: Iterable[str], written: Iterable[str]) -> None:
        """Refuse a folder whose files of these names are not those that a sweep has written."""
        foreign = [n for n in names if n not in written and os.path.lexists(self.folder / n)]
        if foreign:
            raise UserError(
                f"{self.folder} has a file {foreign[0]} that no sweep has written there, and that "
                "would be lost; give another --output"
            )

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """The database within one transaction.

        Raises:
            UserError: if it cannot be read or written; nothing of the transaction is left then.
        """
        path = self.folder / DATABASE
        try:
            with closing(sqlite3.connect(path)) as database, database:
                database.text_factory = lambda text: text.decode(errors="replace")
                yield database
        except (sqlite3.Error, ValueError, OverflowError) as error:  # texts that are none, too
            raise UserError(
                f"cannot use {path}: {error}; what is finished is kept, so see to it (is there "
                "room, are you allowed to?) and give the same command again, or another --output"
            ) from error

    # ---- cells -----------------------------------------------------------------------------------

    def finished(self) -> set[str]:
        """The keys of all cells that are there."""
        with self._database() as database:
            return {key for (key,) in database.execute("SELECT key FROM cells")}

    def save(self, cell: Cell, rows: list[dict[str, Any]], about: Mapping[str, Any]) -> None:
        """Write down a cell that is finished.

        Args:
            rows: of `run_cell`.
            about: what else to keep of it: "evicted", "press_text", "seconds".

        Raises:
            UserError: if it cannot be written; nothing of it is left then.
        """
        record = {**cell._asdict(), **summary_of(rows), **about}
        with self._database() as database:
            inserted = _insert(database, "cells", {"key": cell.key, **record})
            for row in rows:
                texts = {name: _json(row.get(name)) for name in ("answers", "also")}
                _insert(database, "predictions", {"cell": inserted, **row, **texts})

    # ---- all of them -----------------------------------------------------------------------------

    def results(self, cells: Iterable[Cell] = ()) -> pd.DataFrame:
        """A row per finished cell: those of `cells` in their order, then all others."""
        order = {cell.key: place for place, cell in enumerate(cells)}
        found = self._read("SELECT * FROM cells ORDER BY key")
        places = [order.get(key, len(order)) for key in found["key"]]
        found = found.assign(place=places).sort_values("place", kind="stable", ignore_index=True)
        return found.drop(columns=["id", "key", "place"])

    def predictions(self) -> pd.DataFrame:
        """A row per question of every finished cell, with what the cell is."""
        found = self._read(
            "SELECT cells.dataset, cells.press, cells.ratio, cells.budget, cells.mechanism, "
            "cells.press_text, predictions.* "
            "FROM predictions JOIN cells ON cells.id = predictions.cell "
            "ORDER BY cells.key, sample"
        )
        return found.drop(columns="cell")

    def _read(self, query: str) -> pd.DataFrame:
        with self._database() as database:
            cursor = database.execute(query)
            names = [name for name, *_ in cursor.description]
            found = pd.DataFrame(cursor.fetchall(), columns=names)
        return found.astype({"budget": "Int64"})  # numbers, though some are missing

    def write_tables(self, cells: Iterable[Cell] = ()) -> pd.DataFrame:
        """Write the two tables of all cells; returns that of results."""
        results = self.results(cells)
        for name, table in zip(self.tables, (results, self.predictions()), strict=True):
            if name.endswith(".parquet"):
                self._write(name, table.to_parquet(index=False))
            else:
                self._write(name, table.to_csv(index=False, lineterminator="\n").encode())
        return results

    def _write(self, name: str, content: bytes) -> None:
        """Write a file at once or not at all, and note that it is of this sweep."""
        with self._database() as database:
            database.execute("INSERT OR IGNORE INTO written VALUES (?)", (name,))
        path = self.folder / name
        try:
            with NamedTemporaryFile(dir=self.folder, delete=False) as part:
                part.write(content)
            Path(part.name).replace(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Score of a cell with its interval, and what other metrics say on average.

    Scores are None where nobody knows the answers.
    """
    scores = [row["score"] for row in rows if row["score"] is not None]
    low, high = wilson(round(sum(scores)), len(scores)) if scores else (None, None)
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


def _insert(database: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> int | None:
    places = ", ".join(f":{name}" for name in row)
    query = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})"
    return database.execute(query, row).lastrowid
