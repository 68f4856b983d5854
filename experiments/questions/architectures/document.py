"""Write `docs/architectures.md` from the committed results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from experiments.questions.architectures.reach import (
    BOTH,
    HOOK,
    NEITHER,
    PATCH,
    WRONG,
    limits,
    reach,
)

ROOT = Path(__file__).parents[3]
RESULTS, DOCUMENT = ROOT / "results" / "architectures.csv", ROOT / "docs" / "architectures.md"
OLDEST = RESULTS.with_name("architectures_oldest.csv")
"""The same table, measured with the oldest supported release of transformers."""

TEMPLATE = Path(__file__).with_suffix(".md")
"""The page without its numbers and tables."""


def written() -> str:
    """What the document is to say."""
    newest, oldest = (pd.read_csv(path, keep_default_na=False) for path in (RESULTS, OLDEST))
    return document(newest, oldest)


def document(table: pd.DataFrame, oldest: pd.DataFrame) -> str:
    """`docs/architectures.md`: the decoders that refuse a press, and why.

    Args:
        table: of the newest release of transformers that is supported.
        oldest: of the oldest.
    """
    reached, before = reach(table), reach(oldest)
    left_out = sorted(set(table["type"]) - set(reached["type"]))
    pruned = reached[reached["press"] != "nothing evicted"]
    by_type = pruned.groupby("type")["reach"].agg(set)
    n_some = sum(bool(found - {NEITHER, WRONG}) for found in by_type)
    changed = _changed(before, reached)
    return TEMPLATE.read_text(encoding="utf-8").format(
        n=len(by_type),
        none=len(by_type) - n_some,
        all=sum(found == {BOTH} for found in by_type),
        patch=sum(PATCH in found for found in by_type),
        hook=sum(HOOK in found for found in by_type),
        wrong=table["bad"].sum(),
        cells=table["cells"].sum(),
        limits=limits(table).markdown(),
        n_oldest=before["type"].nunique(),
        changed=len(changed),
        oldest=replace(limits(oldest[oldest["type"].isin(changed)]), note="").markdown(),
        n_left_out=len(left_out),
        left_out=", ".join(f"`{kind}`" for kind in left_out),
    )


def _changed(oldest: pd.DataFrame, newest: pd.DataFrame) -> list[str]:
    """Types of which presses reach something else than they do on the newest release."""
    both = oldest.merge(newest, on=["type", "press"], suffixes=("", "_newest"))
    return sorted(set(both.loc[both["reach"] != both["reach_newest"], "type"]))


if __name__ == "__main__":
    DOCUMENT.write_text(written())
