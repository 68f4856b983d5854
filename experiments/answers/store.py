"""A folder of results: what is finished, whole and of one set-up.

```
setup.json            what all cells have in common, and what made them
cells/KEY.csv         predictions of a cell, a row per question
cells/KEY.json        what the cell is, its score, and a digest of the other file
results.csv           a row per cell that is finished
predictions.csv       the predictions of them all
```

A cell is finished once its JSON file is there and fits the other; files are written beside their
place and moved there, so that a process that dies, or a disk that is full, leaves no half of one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from experiments import UserError
from experiments.answers.cells import Cell
from experiments.questions.quality import wilson

FORMATS = ("csv", "parquet")
SETUP = "setup.json"


class Store:
    """The results in one folder.

    Attributes:
        folder: made when the first file is written.
        damaged: keys of cells whose files were found not to fit each other, and were put aside.
    """

    def __init__(self, folder: Path, setup: Mapping[str, Any], file_format: str = "csv") -> None:
        """Open or begin a folder.

        Args:
            setup: what all its cells have in common; "made_with" may differ.
            file_format: of new tables, "csv" or "parquet".

        Raises:
            UserError: if the folder holds results of another set-up, or the format cannot be had.
        """
        if file_format == "parquet" and find_spec("pyarrow") is None:
            raise UserError(
                "parquet needs pyarrow, which is not installed; write csv, or "
                'pip install "hook-or-patch[evaluate]"'
            )
        self.folder, self.file_format = folder, file_format
        self.damaged: list[str] = []
        self._cells = folder / "cells"
        self._check(json.loads(json.dumps(setup)))

    def _check(self, setup: dict[str, Any]) -> None:
        path = self.folder / SETUP
        if not path.exists():
            if self._cells.exists() and any(self._cells.iterdir()):
                raise UserError(
                    f"{self.folder} holds results, and no {SETUP} that says of what; give another "
                    "folder"
                )
            _write(path, _json(setup))
            return
        try:
            former = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is not JSON ({error}); give another folder") from error
        names = sorted((set(former) | set(setup)) - {"made_with"})
        differing = [n for n in names if former.get(n) != setup.get(n)]
        if differing:
            said = "; ".join(f"{n} was {former.get(n)!r}, is {setup.get(n)!r}" for n in differing)
            raise UserError(
                f"{self.folder} holds results of another set-up, with which new ones cannot be "
                f"compared: {said}; give another --output"
            )

    # ---- cells -----------------------------------------------------------------------------------

    def finished(self, cell: Cell) -> bool:
        """Whether the cell is there, whole. What is left of a damaged one is removed."""
        path = self._cells / f"{cell.key}.json"
        if not path.exists():
            return False
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            whole = _digest((self._cells / record["file"]).read_bytes()) == record["sha256"]
        except (ValueError, KeyError, TypeError, FileNotFoundError):
            whole = False
        if not whole:
            path.unlink()
            self.damaged.append(cell.key)
        return whole

    def save(self, cell: Cell, rows: list[dict[str, Any]], about: Mapping[str, Any]) -> None:
        """Write down a cell that is finished.

        Args:
            rows: of `run_cell`.
            about: what else to keep of it.

        Raises:
            UserError: if it cannot be written; nothing of it is left then.
        """
        table = pd.DataFrame(rows)
        table["answers"] = [json.dumps(answers, ensure_ascii=False) for answers in table["answers"]]
        content = self._encoded(table)
        name = f"{cell.key}.{self.file_format}"
        scores = [row["score"] for row in rows]
        low, high = wilson(round(sum(scores)), len(scores))
        record = cell._asdict() | {
            "score": sum(scores) / len(scores),
            "low": low,
            "high": high,
            "questions": len(rows),
            **about,
            "file": name,
            "sha256": _digest(content),
        }
        _write(self._cells / name, content)
        _write(self._cells / f"{cell.key}.json", _json(record))

    def _records(self) -> list[dict[str, Any]]:
        paths = sorted(self._cells.glob("*.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    # ---- all of them -----------------------------------------------------------------------------

    def results(self, cells: Iterable[Cell] = ()) -> pd.DataFrame:
        """A row per finished cell: those of `cells` in their order, then all others."""
        order = {cell.key: place for place, cell in enumerate(cells)}
        records = self._records()
        records.sort(key=lambda r: order.get(Path(r["file"]).stem, len(order)))
        return pd.DataFrame(records).drop(columns=["file", "sha256"], errors="ignore")

    def predictions(self) -> pd.DataFrame:
        """A row per question of every finished cell, with what the cell is."""
        tables = []
        for record in self._records():
            table = _decoded(self._cells / record["file"])
            identity = {name: record[name] for name in (*Cell._fields, "press_text")}
            tables.append(table.assign(**identity)[[*identity, *table.columns]])
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()

    def write_tables(self, cells: Iterable[Cell] = ()) -> pd.DataFrame:
        """Write the two tables of all cells; returns that of results."""
        results = self.results(cells)
        for name, table in (("results", results), ("predictions", self.predictions())):
            _write(self.folder / f"{name}.{self.file_format}", self._encoded(table))
        return results

    def _encoded(self, table: pd.DataFrame) -> bytes:
        if self.file_format == "csv":
            return table.to_csv(index=False, lineterminator="\n").encode()
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        return buffer.getvalue()


def _decoded(path: Path) -> pd.DataFrame:
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    # As text, for an answer such as 007 is no number.
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return table.astype({"sample": int, "score": float})


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Write a file at once or not at all.

    Raises:
        UserError: if there is no room or no permission.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; what is finished is kept, so make "
            "room and give the same command again"
        ) from error
