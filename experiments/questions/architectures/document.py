"""Write `docs/architectures.md` from the committed results."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.questions.architectures.reach import document

ROOT = Path(__file__).parents[3]
RESULTS, DOCUMENT = ROOT / "results" / "architectures.csv", ROOT / "docs" / "architectures.md"
OLDEST = RESULTS.with_name("architectures_oldest.csv")
"""The same table, measured with the oldest supported release of transformers."""


def written() -> str:
    """What the document is to say."""
    newest, oldest = (pd.read_csv(path, keep_default_na=False) for path in (RESULTS, OLDEST))
    return document(newest, oldest)


if __name__ == "__main__":
    DOCUMENT.write_text(written())
