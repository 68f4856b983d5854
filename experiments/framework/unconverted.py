"""Experiments that are still made of functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure
from rich.progress import Progress

from experiments.framework.experiment import Experiment, Finding, Tables


@dataclass(frozen=True)
class NoOptions:
    """Nothing can be chosen."""


class Unconverted(Experiment[NoOptions]):
    """An experiment of functions."""

    full = quick = NoOptions()
    method = ""

    def __init__(
        self,
        *,
        name: str,
        title: str,
        question: str,
        run: Callable[[], Tables],
        figures: Callable[[Tables], dict[str, Figure]],
        summary: Callable[[Tables], str],
        repeat: str,
    ) -> None:
        self.name, self.title, self.question = name, title, question  # type: ignore[misc]
        self._run, self._figures, self._summary = run, figures, summary

    def measure(self, options: NoOptions, progress: Progress) -> Tables:
        return self._run()

    def findings(self, tables: Tables) -> list[Finding]:
        return []

    def remarks(self, tables: Tables) -> list[str]:
        return [self._summary(tables)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return self._figures(tables)
