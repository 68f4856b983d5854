"""What an experiment is. The command line, the study and the report follow from it.

```python
@dataclass(frozen=True)
class Options:
    press: Annotated[tuple[str, ...], typer.Option(help="Press to weigh.")] = ("KnormPress",)
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 20

class Weight(Experiment[Options]):
    \"""Weigh presses, one by one.

    How heavy is a press?

    Each press is put on a scale. Another scale would give another answer. ...
    \"""

    name, title = "weight", "What a press weighs"
    full, quick = Options(), Options(rounds=3)

    def measure(self, options, progress):
        rows = [weigh(name) for name in progress.track(options.press, description=self.name)]
        return {"weight": pd.DataFrame(rows)}

    def findings(self, tables):
        heaviest = tables["weight"]["grams"].max()
        return [Finding("heaviest", f"No press weighs more than **{heaviest:.0f}** grams.")]

EXPERIMENT = Weight()
```

A line in `experiments.EXPERIMENTS` makes it a command, and a part of the study.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple

import pandas as pd
import yaml
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments.framework.intervals import NONE
from experiments.framework.own_model import LeftOutError, OptionsT, OwnModel, Planned
from experiments.framework.tables import ResultTable

Tables = dict[str, pd.DataFrame]
"""Tables by name; a name is the stem of the CSV file."""

MAX_WORDS = 25
"""Of a finding."""

_BOLD = re.compile(r"\*\*(.+?)\*\*")
_NUMBER = re.compile(r"-?\d[\d,.]*")
_INTERVAL = re.compile(r"\[([-+]?[\d.]+), ([-+]?[\d.]+)\]")


class Evidence(str, Enum):
    """A kind of evidence; its value is what findings are labelled with."""

    BITS = "bit equality"
    STATE = "state compared"
    REFERENCE = "checked against a reference"
    TIME = "timing on one machine"
    BYTES = "bytes counted"
    MODEL = "one small model"
    EVENTS = "one forward observed"

    @property
    def threat(self) -> str:
        """What it shows and what it does not, in a sentence or two."""
        return str(_THREATS[self.value])


_THREATS = yaml.safe_load(Path(__file__).with_name("evidence.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Finding:
    """One thing that was found out, in a sentence computed from the tables.

    Attributes:
        name: of the finding among those of its experiment; part of its anchor, so it stays.
        text: Markdown of at most `MAX_WORDS` words, with one number in bold.
        need: what a reader wants to do, such as "decode a pruned cache", to whom this answers; the
            report's first page lists the needs. Empty: none.
        verdict: what the answer to the need comes to.
        evidence: what kind it rests on, if another than most findings of its experiment.
        again: the number in bold from other seeds, where the study has drawn contexts anew.

    Raises:
        ValueError: if `text` is too long, or has not one number in bold.
    """

    name: str
    text: str
    need: str = ""
    verdict: Literal["works", "costs", "breaks"] | None = None
    evidence: Evidence | None = None
    again: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        words = len(self.text.split())
        if words > MAX_WORDS:
            raise ValueError(f"{words} words, more than {MAX_WORDS}: {self.text}")
        bold = _BOLD.findall(self.text)
        if len(bold) != 1 or len(_NUMBER.findall(bold[0])) != 1:
            raise ValueError(f"a finding has one number in bold: {self.text}")

    @property
    def number(self) -> float:
        """The number in bold, as it is written: 67 of "67%"."""
        (bold,) = _BOLD.findall(self.text)
        return float(_NUMBER.findall(bold)[0].replace(",", ""))

    @property
    def basis(self) -> str:
        """What it rests on, in a few words; empty: nobody said."""
        kind = "" if self.evidence is None else self.evidence.value
        seeds = ", ".join(map("{:g}".format, self.again))
        return f"{kind}; {seeds} from other seeds" if seeds else kind

    @property
    def interval(self) -> tuple[float, float]:
        """Of the number in bold, as it is written; both ends are NaN where it has none."""
        found = _INTERVAL.search(self.text)
        return (float(found[1]), float(found[2])) if found else NONE


class Claim(NamedTuple):
    """How a finding is measured again in about a minute.

    Attributes:
        options: of the experiment, on a small grid.
        within: by how much the number may differ from that of the whole study.
    """

    options: Any
    within: float = 0.0


class Contrast(NamedTuple):
    """Hooks against patches in one number each, for the report's first figure.

    Attributes:
        title: what the numbers are.
        bars: numbers by what they are of: "hooks", "patches", and perhaps others.
    """

    title: str
    bars: dict[str, float]


class Experiment(ABC, Generic[OptionsT]):
    """One experiment of the study.

    The docstring of a subclass has three paragraphs and is the help of its command: what it does;
    the `question`, one sentence; and the `method`, three to five: how it is measured, what would
    change the answer, and what it does not show. Whatever says what was found reads it off the
    tables, which may come from CSV files.

    Attributes:
        name: of the command, and stem of its files.
        title: heading in the report.
        full: options of `make results`, and defaults of the command. A frozen dataclass, each of
            whose fields is a flag: `Annotated[type, typer.Option(help=...)]`, with a default. What
            a flag can repeat is a `tuple[type, ...]`, empty by default where that stands for all.
        quick: options of `make study`, on smaller grids.
        evidence: what kind its findings rest on, where they do not say.
        claims: how single findings are measured again in about a minute, by their names.
        redrawn: options, with a `seed`, under which findings are drawn again from other seeds.
        left_out: why it has nothing to say of a model of the user's own, if it takes none.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    method: ClassVar[str]
    full: OptionsT
    quick: OptionsT
    evidence: ClassVar[Evidence | None] = None
    claims: ClassVar[dict[str, Claim]] = {}
    redrawn: OptionsT | None = None
    left_out: ClassVar[str] = "it runs on small models of its own"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        paragraphs = [" ".join(text.split()) for text in (cls.__doc__ or "").split("\n\n")]
        if len(paragraphs) == 3:
            _, cls.question, cls.method = paragraphs

    @abstractmethod
    def measure(self, options: OptionsT, progress: Progress) -> Tables:
        """Make the tables.

        Args:
            progress: shows how far this is; `progress.track` and `progress.console` serve most.

        Raises:
            UserError: if `options` ask for what cannot be done; before anything is run.
        """

    def on(self, own: OwnModel) -> Planned[OptionsT]:
        """What to run on a model of the user's own; by default what `make study` runs, on it.

        Raises:
            LeftOutError: if the experiment has nothing to say of that model.
        """
        return Planned(self.quick_on(own))

    def quick_on(self, own: OwnModel, **changed: Any) -> OptionsT:
        """The quick options with the user's own model, how it is loaded, and what else is given.

        Raises:
            LeftOutError: if the experiment takes no model.
        """
        quick: Any = self.quick
        if not hasattr(quick, "model"):
            raise LeftOutError(self.left_out)
        model = (own.model,) if isinstance(quick.model, tuple) else own.model
        told = {"model": model, "dtype": own.dtype, "device": own.device}
        told = {name: value for name, value in told.items() if hasattr(quick, name)}
        return replace(quick, **(told | changed))

    @abstractmethod
    def findings(self, tables: Tables) -> list[Finding]:
        """What was found, the answer to the question first."""

    def views(self, tables: Tables) -> list[ResultTable]:
        """Tables to be read by people."""
        return []

    def remarks(self, tables: Tables) -> list[str]:
        """What else a reader should know: Markdown, a paragraph or a list each."""
        return []

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """Figures by name, the stem of the SVG file; the first shows the first finding.

        Each has a label (`Figure.set_label`) that says what it shows.
        """
        return {}

    def contrasts(self, tables: Tables) -> list[Contrast]:
        """What goes into the report's first figure."""
        return []

    def passed(self, tables: Tables) -> bool:
        """Whether the command ends with status 0."""
        return True

    def markdown(self, tables: Tables) -> str:
        """All that is said of the tables, as Markdown."""
        findings = " ".join(finding.text for finding in self.findings(tables))
        views = [view.markdown() for view in self.views(tables)]
        return "\n\n".join(filter(None, [findings, *views, *self.remarks(tables)])) + "\n"


AnyExperiment = Experiment[Any]
"""An experiment, whatever its options."""
