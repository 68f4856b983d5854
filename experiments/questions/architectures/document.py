"""Write `docs/architectures.md` from the committed results."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.questions.architectures.reach import BOTH, HOOK, NEITHER, PATCH, limits, reach

ROOT = Path(__file__).parents[3]
RESULTS, DOCUMENT = ROOT / "results" / "architectures.csv", ROOT / "docs" / "architectures.md"
OLDEST = RESULTS.with_name("architectures_oldest.csv")
"""The same table, measured with the oldest supported release of transformers."""

TEMPLATE = Path(__file__).with_suffix(".md")
"""The page without its numbers and tables."""


def written() -> str:
    """What the document is to say: the decoders that refuse a press, and why."""
    newest, oldest = (pd.read_csv(path, keep_default_na=False) for path in (RESULTS, OLDEST))
    numbers = {**_numbers(newest), **{f"{k}_oldest": n for k, n in _numbers(oldest).items()}}
    left_out = sorted(set(newest["type"]) - set(reach(newest)["type"]))
    return TEMPLATE.read_text(encoding="utf-8").format(
        **numbers,
        limits=limits(newest).markdown(),
        left_out=", ".join(f"`{kind}`" for kind in left_out),
    )


def _numbers(table: pd.DataFrame) -> dict[str, int]:
    reached = reach(table)
    pruned = reached[reached["press"] != "nothing evicted"]
    by_type = pruned.groupby("type")["reach"].agg(set)
    return {
        "n": len(by_type),
        "all": sum(found == {BOTH} for found in by_type),
        "none": sum(found == {NEITHER} for found in by_type),
        "patch": sum(PATCH in found for found in by_type),
        "hook": sum(HOOK in found for found in by_type),
        "wrong": table["bad"].sum(),
        "cells": table["cells"].sum(),
    }


if __name__ == "__main__":
    DOCUMENT.write_text(written())
