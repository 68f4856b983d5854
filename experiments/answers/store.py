"""The folder of a sweep: its set-up and its finished cells.

```
setup.json            the set-up
cells/KEY.json        a finished cell with its predictions
results.csv           a row per finished cell
predictions.csv       a row per question of all cells
```

Every file is written atomically, so a killed process or a full disk leaves no partial cell. When a
sweep continues, the set-up and the cells are read; the tables are made from the cells.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoConfig

from experiments import UserError, refusing
from experiments.answers.cells import Cell, Prediction, Result
from experiments.answers.settings import SWEPT, Settings
from experiments.framework.environment import code_digest, digest_of, environment_info
from experiments.framework.manifest import check_writable, overtaken, write_at_once
from experiments.framework.results import csv_of
from experiments.loading import local_folder, of_the_repository

SETUP, CELLS, RESULTS, PREDICTIONS = "setup.json", "cells", "results.csv", "predictions.csv"

OF_A_CELL = ("dataset", "press", "ratio", "budget", "mechanism")
OF_RESULTS = (
    *OF_A_CELL,
    *("score", "low", "high", "questions", "evicted", "press_text", "seconds"),
)
"""Columns of `results.csv`."""


class Store:
    """The results in one folder, which is created if it does not exist."""

    def __init__(self, folder: Path, setup: Mapping[str, Any]) -> None:
        """Open a folder, or create it.

        Args:
            setup: the settings that all cells share; "made_with" may differ.

        Raises:
            UserError: if the folder holds results of another set-up, or other files that would be
                overwritten, or if it cannot be written to.
        """
        self.folder, self._setup = folder, json.dumps(setup, indent=2, default=str)
        if os.path.lexists(folder / SETUP):
            self._check_setup()
            return
        for name in (CELLS, RESULTS, PREDICTIONS):
            if os.path.lexists(folder / name):
                raise UserError(
                    f"{folder} has {name}, which no sweep has written there and which would be "
                    "lost; give another --output"
                )
        check_writable(folder)

    def _check_setup(self) -> None:
        path, setup = self.folder / SETUP, json.loads(self._setup)
        wrong, advice = f"{path} is no file of a sweep", "; give another --output"
        with refusing(wrong, OSError, AttributeError, ValueError, RecursionError, advice=advice):
            former = dict(json.loads(path.read_bytes()).items())
        names = sorted((set(former) | set(setup)) - {"made_with"})
        differing = [n for n in names if former.get(n) != setup.get(n)]
        if differing:
            pairs = "; ".join(f"{n} was {former.get(n)!r}, is {setup.get(n)!r}" for n in differing)
            raise UserError(
                f"{self.folder} holds results of another set-up, with which new ones cannot be "
                f"compared: {pairs}; give another --output"
            )

    def _write(self, name: str, text: str) -> None:
        write_at_once(self.folder / name, text.encode(errors="replace"))  # lone surrogates

    def finished(self) -> dict[Cell, Result]:
        """Every finished cell, in the order of their keys.

        Raises:
            UserError: if one cannot be read.
        """
        found = []
        advice = "; remove it, and its cell is run again, or give another --output"
        for path in (self.folder / CELLS).glob("*.json"):
            with refusing(f"{path} is damaged", OSError, ValueError, advice=advice):
                found.append(Result.model_validate_json(path.read_bytes()))
        return {result.cell: result for result in sorted(found, key=lambda each: each.cell.key)}

    def save(self, result: Result) -> None:
        """Save a finished cell.

        Raises:
            UserError: if it cannot be written, or another sweep has written it meanwhile, or cells
                of another set-up.
        """
        # A folder without cells holds no set-up, so settings that gave none can be corrected.
        if not os.path.lexists(self.folder / SETUP):
            self._write(SETUP, f"{self._setup}\n")
        self._check_setup()
        name = f"{CELLS}/{hashlib.sha256(result.cell.key.encode()).hexdigest()[:16]}.json"
        if (self.folder / name).exists():
            raise overtaken("sweep", self.folder)
        self._write(name, json.dumps(result.model_dump(), ensure_ascii=False))

    def write_tables(self, cells: Iterable[Cell] = ()) -> pd.DataFrame:
        """Write the two tables of all cells, if there are any.

        Returns:
            A row per finished cell: those of `cells` in their order, then all others.
        """
        finished = self.finished()
        order = dict.fromkeys([*(cell for cell in cells if cell in finished), *finished])
        results = _table((finished[cell].summary() for cell in order), OF_RESULTS)
        predictions = _table(
            (
                {**result.cell._asdict(), "press_text": result.press_text, **each.model_dump()}
                | {"answers": json.dumps(each.answers, ensure_ascii=False)}
                for result in finished.values()
                for each in result.predictions
            ),
            (*OF_A_CELL, "press_text", *Prediction.model_fields),
        )
        for name, table in {RESULTS: results, PREDICTIONS: predictions}.items():
            if finished:
                self._write(name, csv_of(table))
        return results


def _table(rows: Iterable[dict[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    # Budgets are integers with missing values.
    return pd.DataFrame(rows, columns=list(columns)).astype({"budget": "Int64"})


# ---- the set-up ----------------------------------------------------------------------------------

_OF_A_MODEL = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Files in a model's folder: weights, configurations, the tokenizer's, its template, and code."""

_VERSIONS = "python", "torch", "transformers", "numpy", "wrapt"
"""What every cell depends on."""


def setup_of(settings: Settings) -> dict[str, Any]:
    """The settings that cells share, model, code and `_VERSIONS`; `made_with` is for readers."""
    made_with = environment_info()
    shared = {name: value for name, value in asdict(settings).items() if name not in SWEPT}
    shared["threads"] = settings.threads or torch.get_num_threads()
    return {
        **shared,
        "model_fingerprint": model_fingerprint(
            settings.model, trust_remote_code=settings.trust_remote_code, **settings.model_kwargs
        ),
        "versions": {name: made_with["versions"].get(name) for name in _VERSIONS},
        "code": code_digest(),
        "made_with": made_with,
    }


def model_fingerprint(name: str, **given: Any) -> str:
    """The commit of a hub model, loaded with `given`, or a digest of the files of a folder."""
    if (folder := local_folder(name)) is None:
        what = f"{name!r} is neither a folder nor a model that the hub gives"
        with refusing(what, OSError, ValueError):
            config = AutoConfig.from_pretrained(name, **of_the_repository(given))
            return str(getattr(config, "_commit_hash", None))
    return digest_of(folder, _OF_A_MODEL)
