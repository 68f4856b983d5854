"""Write `docs/architectures.md` from the committed results."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.questions.architectures.reach import document

ROOT = Path(__file__).parents[3]
RESULTS, DOCUMENT = ROOT / "results" / "architectures.csv", ROOT / "docs" / "architectures.md"

if __name__ == "__main__":
    DOCUMENT.write_text(document(pd.read_csv(RESULTS, keep_default_na=False)))
