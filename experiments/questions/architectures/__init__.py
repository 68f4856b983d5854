"""Which decoders a press is right on, by which mechanism, and why it is refused on the others."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments import UserError
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Experiment, Finding, Tables
from experiments.framework.options import one_of, several
from experiments.framework.own_model import SMALL, LeftOutError, OwnModel, Planned
from experiments.framework.tables import ResultTable
from experiments.questions.architectures.decoders import TOLD, decoders
from experiments.questions.architectures.reach import BOTH, figure, limits, reach
from experiments.questions.architectures.sweep import condensed, measure

REPRESENTATIVES = tuple(filter(decoders().__contains__, TOLD["representatives"]))
"""One type of every structural kind: what it stands for is said in `docs/architectures.md`."""


@dataclass(frozen=True)
class Options:
    """What to sweep."""

    type: Annotated[
        tuple[str, ...],
        typer.Option(help="Model type or variant; repeatable.", show_default="all"),
    ] = ()
    attention: Annotated[
        tuple[str, ...], several(str, "Attention implementation.", one_of(("eager", "sdpa")))
    ] = ("eager", "sdpa")
    oldest: Annotated[
        bool,
        typer.Option(help="Sweep with the oldest supported transformers too, where it is."),
    ] = True


class Architectures(Experiment[Options]):
    """Sweep every decoder of the installed transformers with tiny random weights.

    On which decoders is a press right, by hook and by patch, and why not on the others?

    Every causal and image-text decoder of the installed transformers is built small, with
    random weights, and run on text, ten of them with an image in it too. What a press leaves
    and the logits that follow are compared with a run over the full cache in which all that is
    evicted is masked, by code that shares nothing with the presses. Long contexts and trained
    weights are not tried.
    """

    name = "architectures"
    title = "Which decoders it works on"
    evidence = Evidence.REFERENCE
    full = Options()
    quick = Options(type=REPRESENTATIVES, oldest=False)

    def on(self, own: OwnModel) -> Planned[Options]:
        if own.model_type not in decoders():
            raise LeftOutError(f"it builds no small model of the type {own.model_type}")
        return Planned(Options(type=(own.model_type,), oldest=False), seconds=5, note=SMALL)

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Every press, by both mechanisms, on every decoder, under all conditions.

        Returns:
            `architectures`: see `condensed`; and `architectures_oldest`, the same under sdpa with
            the oldest transformers that is supported, where that is installed.
        """
        names = options.type or tuple(decoders())
        task = progress.add_task(self.name, total=len(names))
        rows = measure(
            names,
            choose=lambda cell: cell.attention in options.attention,
            progress=lambda name: progress.advance(task),
        )
        tables = {"architectures": condensed(rows)}
        if options.oldest and _OLDEST.exists():
            tables["architectures_oldest"] = _with_oldest(options.type)
        return tables

    def findings(self, tables: Tables) -> list[Finding]:
        return [_finding(name, table) for name, table in tables.items()]

    def remarks(self, tables: Tables) -> list[str]:
        """What could not be tried."""
        table = tables["architectures"]
        left_out = ", ".join(f"`{name}`" for name in table["type"][table["cells"] == 0].unique())
        return [f"Not run on text alone, or not built small: {left_out or 'none'}."]

    def views(self, tables: Tables) -> list[ResultTable]:
        return [limits(tables["architectures"])]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {"architectures": figure(tables["architectures"])}

    def passed(self, tables: Tables) -> bool:
        return not any(table["bad"].any() for table in tables.values())


def _finding(name: str, table: pd.DataFrame) -> Finding:
    """On how many decoders presses are right, with the newest or the oldest transformers."""
    reached = reach(table)
    presses = reached[reached["press"] != "nothing evicted"]
    reaches = presses.groupby("type")["reach"].agg(set)
    wrong, every = int(table["bad"].sum()), sum(found == {BOTH} for found in reaches)
    some, newest = sum(BOTH in found for found in reaches), name == "architectures"
    where = "By hook and patch alike" if newest else "With the oldest transformers"
    text = (
        f"{where}, every press is right on {every} of {len(reaches)} decoders, some press on "
        f"**{some}**; {wrong} of {table['cells'].sum():,} cases are wrong."
    )
    if not newest:
        return Finding("oldest", text)
    return Finding("reach", text, "prune the model that you run", "breaks" if wrong else "works")


_ROOT = Path(__file__).parents[3]
_OLDEST = _ROOT / ".venv-oldest" / "bin" / "python"
"""Where `make test-oldest` installs the oldest transformers that is supported."""


def _with_oldest(types: tuple[str, ...]) -> pd.DataFrame:
    """The same sweep in the environment with the oldest transformers.

    Raises:
        UserError: if it fails.
    """
    with TemporaryDirectory() as folder:
        only = (part for kind in types for part in ("--type", kind))
        what = ["experiments", "architectures", "--no-oldest", "--attention", "sdpa", *only]
        command = [str(_OLDEST), "-m", *what, "--output", folder]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        found = Path(folder) / "architectures.csv"
        if not found.exists():
            reason = (done.stderr.strip() or "no message").splitlines()[-1]
            raise UserError(f"the sweep with {_OLDEST} failed: {reason}; try --no-oldest")
        return pd.read_csv(found, keep_default_na=False)


EXPERIMENT = Architectures()
