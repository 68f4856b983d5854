"""Accuracy of answers about contexts that were compressed before the questions were known.

This is the study's own sweep, kept in memory; the command `experiments.answers.sweep` sweeps any
models, presses and datasets.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments.answers.cells import NO_PRESS, Prediction, forget, plan, run_cell
from experiments.answers.engines import Failure, serial
from experiments.answers.settings import STUDIED, Settings
from experiments.answers.sweep import command, press_words, shown
from experiments.framework.experiment import Evidence, Experiment, Finding, Tables
from experiments.framework.frames import heat_maps, wide_table
from experiments.framework.intervals import METHOD, bracket, bracketed, mean_interval
from experiments.framework.own_model import LeftOutError, OwnModel, Planned
from experiments.framework.shared import GOOD
from experiments.framework.tables import ResultTable
from experiments.framework.wording import sentences

__all__ = ["EXPERIMENT", "Evaluate", "command"]

_finding = sentences(__file__)

TASKS = {"single": "one fact", "multikey": "1 of 16 facts", "multiquery": "4 of 16 facts"}
"""Names of the study's tasks in figures and tables."""

GENERATED = ("niah_single", "niah_multikey", "variable_tracking", "qa")
"""Synthetic tasks for the user's own model."""

LEAST = 0.05
"""Share of right answers without a press below which the presses are not compared."""

_NAME = re.compile(r"\w+Press")


class Evaluate(Experiment[Settings]):
    """Measure accuracy by press, ratio or budget, mechanism and dataset.

    How many answers are still right, by task and press, when a long context is compressed before
    the questions about it are known?

    The shipped model reads each context through the pipeline, which compresses it without a
    question and then answers several questions from the one pruned cache. Answers are scored
    against the true ones, and the answers of the two mechanisms are compared with each other. It
    works if the best press gives 90% right answers, by its interval. Longer contexts, larger models
    or a press that sees the questions would change the numbers. The contexts are facts hidden among
    unrelated words, so the scores need not carry over to coherent text.
    """

    name = "evaluate"
    title = "From context to answer"
    evidence = Evidence.MODEL
    full = Settings(attn_implementation="sdpa")
    quick = Settings(ratio=(0.0, 0.8), samples=12)
    redrawn = Settings(ratio=(0.0, 0.8))

    def on(self, own: OwnModel) -> Planned[Settings]:
        (length,) = own.at_most(1024)
        generated = tuple(f"synthetic/{task}@{length}" for task in GENERATED)
        presses = [text for text in STUDIED if set(_NAME.findall(text)) <= set(own.presses)]
        if not presses:
            raise LeftOutError(f"none of {', '.join(STUDIED)} can be opened on it")
        grid = {"press": tuple(presses), "dataset": generated, "ratio": (0.0, 0.5)}
        options = self.quick_on(own, **grid, samples=6, batch_size=1)
        n_answers = options.samples * (1 + 2 * len(presses)) * len(generated)
        return Planned(options, n_answers * length, n_answers * 48, seconds=5)

    def measure(self, options: Settings, progress: Progress) -> Tables:
        cells = plan(options)
        rows = []
        for cell, outcome in shown(serial(cells, partial(run_cell, options)), len(cells), progress):
            if isinstance(outcome, Failure):
                raise RuntimeError(f"{cell}: {outcome.reason}")
            rows.append(outcome.summary() | _words(outcome.predictions))
        forget()  # free the model before the next experiment loads its own
        return {self.name: pd.DataFrame(rows).drop(columns=["press_text", "seconds"])}

    def findings(self, tables: Tables) -> list[Finding]:
        table = tables[self.name]
        bare = table.loc[table["press"] == NO_PRESS, "score"].mean()
        if bare < LEAST:
            return [_finding("best", as_in="few", right=bare), _finding_on_agreement(table)]
        rows = _compared(table)
        most = rows["ratio"].max()
        means = rows[rows["ratio"] == most].groupby("press", sort=False)["score"].mean()
        press, right = means.idxmax(), means.max()
        ends = _interval(rows[(rows["ratio"] == most) & (rows["press"] == press)])
        low, high = np.nan_to_num(ends, nan=right)
        works = "works" if low >= GOOD else "costs" if high < GOOD else None
        interval = bracket(100 * ends[0], 100 * ends[1], ".0f")
        said = {"most": most, "press": press, "n": len(means), "right": right, "interval": interval}
        return [_finding("best", works, **said), _finding_on_agreement(table)]

    def views(self, tables: Tables) -> list[ResultTable]:
        table = tables[self.name]
        bare = table[table["press"] == NO_PRESS]
        whole = ", ".join(map("{:.1%} ({})".format, bare["score"], _tasks(bare))) or "not measured"
        note = (
            f"Share of right answers to {table['questions'].iloc[0]} questions per cell, with "
            f"{METHOD} over contexts. Without a press: {whole}."
        )
        rows = _compared(table)
        cells = [bracketed(row, "score", ".1%") for row in rows.to_dict("records")]
        column = rows["task"] + rows["ratio"].map(", {:.0%} evicted".format)
        return [wide_table(note, rows.assign(column=column), ["press"], "column", cells)]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """Right answers by press and task, a panel per ratio."""
        panels = {
            f"{ratio:.0%} of the context evicted": rows.pivot_table(
                "score", "press", "task", sort=False
            )
            for ratio, rows in _compared(tables[self.name]).groupby("ratio")
        }
        label = "Share of right answers by press (rows) and task (columns)"
        return {self.name: heat_maps(panels, label)}


def _words(predictions: list[Prediction]) -> dict[str, str]:
    """Answers, their scores and context numbers as text, in the order of the questions."""
    known = [each for each in predictions if each.score is not None]
    contexts = pd.Series([each.context for each in known], dtype=str).factorize()[0]
    return {
        "answers": " ".join(each.prediction for each in predictions),
        "scores": " ".join(f"{each.score:g}" for each in known),
        "contexts": " ".join(map(str, contexts)),
    }


def _interval(rows: pd.DataFrame) -> tuple[float, float]:
    """Interval of a press's mean score; NaN if tasks differ in their questions."""
    if rows["questions"].nunique() > 1:
        return np.nan, np.nan
    columns = ["scores", "contexts"]
    split = rows.assign(**{name: rows[name].astype(str).str.split() for name in columns}).explode(
        columns
    )
    clusters = split["dataset"] + " " + split["contexts"]
    return mean_interval(split["scores"].astype(float), clusters)


def _tasks(table: pd.DataFrame) -> pd.Series[str]:
    names = table["dataset"].str.extract(r"/([\w-]+)", expand=False)
    return names.map(lambda name: TASKS.get(name, name))


def _compared(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of one mechanism with readable press names and the `task`, the best press first."""
    rows = table[table["press"] != NO_PRESS].drop_duplicates(["dataset", "press", "ratio"])
    means = rows.groupby("press")["score"].mean()
    best = list(means.sort_values(ascending=False, kind="stable").index)
    named = rows.assign(rank=rows["press"].map(best.index), task=_tasks(rows))
    named["press"] = named["press"].map(press_words)
    return named.sort_values(["ratio", "rank"], kind="stable")


def _finding_on_agreement(table: pd.DataFrame) -> Finding:
    pressed = table[table["press"] != NO_PRESS]
    answers = pressed.groupby(["dataset", "press", "ratio"])["answers"].agg(["size", "nunique"])
    both = answers[answers["size"] == 2]
    other = int((both["nunique"] > 1).sum())
    verdict = "breaks" if other else None
    return _finding("agreement", verdict, Evidence.BITS, other=other, n=len(both))


EXPERIMENT = Evaluate()
