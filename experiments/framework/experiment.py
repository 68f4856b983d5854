"""What every experiment of the study provides, so that one command can run and report them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

Tables = dict[str, pd.DataFrame]
"""Tables by name; a name is the stem of the CSV file."""


@dataclass(frozen=True)
class Experiment:
    """One experiment of the study.

    Attributes:
        name: command name and stem of its files.
        title: heading in the report.
        question: one sentence: what it asks.
        run: makes the tables, at the size that the study uses, with progress on stderr.
        figures: figures by name (stem of the PNG file), drawn from the tables.
        summary: what was measured, as Markdown, read off the tables.
        repeat: the command that repeats it.
    """

    name: str
    title: str
    question: str
    run: Callable[[], Tables]
    figures: Callable[[Tables], dict[str, Figure]]
    summary: Callable[[Tables], str]
    repeat: str
