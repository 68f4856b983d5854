"""The base class of experiments, from which command line, study and report are derived.

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

A line in `experiments.EXPERIMENTS` makes it a command and a part of the study.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments import data_of
from experiments.framework.intervals import NONE
from experiments.framework.own_model import LeftOutError, OptionsT, OwnModel, Planned
from experiments.framework.tables import ResultTable

Tables = dict[str, pd.DataFrame]
"""Tables by name; the name is the stem of the CSV file."""

MAX_WORDS = 25
"""Longest text of a finding, in words."""

_BOLD = re.compile(r"\*\*(.+?)\*\*")
_NUMBER = re.compile(r"-?\d[\d,.]*")
_INTERVAL = re.compile(r"\[([-+]?[\d.]+), ([-+]?[\d.]+)\]")


class Evidence(str, Enum):
    """A kind of evidence; its value is the label of findings."""

    BITS = "bit equality"
    STATE = "state compared"
    REFERENCE = "checked against a reference"
    TIME = "timing on one machine"
    BYTES = "bytes counted"
    MODEL = "one small model"
    EVENTS = "one forward observed"

    @property
    def threat(self) -> str:
        """The threat to validity: what such evidence shows and what it does not."""
        return str(_THREATS[self.value])


_THREATS = data_of(Path(__file__).with_name("evidence.yaml"))


@dataclass(frozen=True)
class Finding:
    """One result, as a sentence computed from the tables.

    Attributes:
        name: unique within its experiment; part of its anchor, so do not change it.
        text: Markdown of at most `MAX_WORDS` words, with exactly one number in bold.
        need: what a reader wants to do, such as "decode a pruned cache"; the report's first table
            lists the findings by need. Empty: the finding is not in that table.
        verdict: the answer to the need, in one word.
        evidence: its kind of evidence, if it differs from that of its experiment.
        reseeded: values of the bold number with contexts from other seeds, if measured.

    Raises:
        ValueError: if `text` is too long, or does not have exactly one number in bold.
    """

    name: str
    text: str
    need: str = ""
    verdict: Literal["works", "costs", "breaks"] | None = None
    evidence: Evidence | None = None
    reseeded: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        words = len(self.text.split())
        if words > MAX_WORDS:
            raise ValueError(f"{words} words, more than {MAX_WORDS}: {self.text}")
        bold = _BOLD.findall(self.text)
        if len(bold) != 1 or len(_NUMBER.findall(bold[0])) != 1:
            raise ValueError(f"a finding has one number in bold: {self.text}")

    @property
    def number(self) -> float:
        """The number in bold, without its unit: 67 of "67%"."""
        (bold,) = _BOLD.findall(self.text)
        return float(_NUMBER.findall(bold)[0].replace(",", ""))

    @property
    def basis(self) -> str:
        """The kind of evidence and the numbers from other seeds; empty if neither is known."""
        kind = [self.evidence.value] if self.evidence else []
        numbers = ", ".join(map("{:g}".format, self.reseeded))
        return "; ".join([*kind, *([f"{numbers} from other seeds"] if numbers else [])])

    @property
    def interval(self) -> tuple[float, float]:
        """The interval in the text; both ends are NaN if there is none."""
        found = _INTERVAL.search(self.text)
        return (float(found[1]), float(found[2])) if found else NONE


class Claim(NamedTuple):
    """How to repeat a finding in about a minute.

    Attributes:
        options: options of the experiment, with a small grid.
        within: largest allowed difference between its number and that of the full study.
    """

    options: Any
    within: float = 0.0


class Contrast(NamedTuple):
    """Hooks compared with patches, one number each, for the report's first figure.

    Attributes:
        title: what the numbers measure.
        bars: numbers by mechanism: "hooks", "patches", and possibly others.
    """

    title: str
    bars: dict[str, float]


class Experiment(ABC, Generic[OptionsT]):
    """One experiment of the study.

    The docstring of a subclass has three paragraphs and is the help of its command: what it does;
    the `question`, one sentence; and the `method`, a few: how it is measured, what would change the
    answer, and what it does not show. Findings, views and figures are computed from the
    tables alone, which may have been read from CSV files.

    Attributes:
        name: name of the command, and stem of its files.
        title: heading in the report.
        full: options of `make results`, and defaults of the command. A frozen dataclass, each of
            whose fields is a flag: `Annotated[type, typer.Option(help=...)]`, with a default. A
            flag that can be repeated is a `tuple[type, ...]`; an empty default may mean all.
        quick: options of `make study`, on smaller grids.
        evidence: kind of evidence of findings that do not set their own.
        claims: by the finding's name, how to repeat it in about a minute.
        redrawn: options with a `seed` for measuring the findings with other seeds.
        left_out: for experiments without a `model` option, why they do not run on the user's model.
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
        """Run the experiment and return its tables.

        Args:
            progress: a progress bar; most experiments use `progress.track` and `progress.console`.

        Raises:
            UserError: if `options` cannot be met; raised before anything runs.
        """

    def on(self, own: OwnModel) -> Planned[OptionsT]:
        """The plan for the user's own model; by default the quick options with that model.

        Raises:
            LeftOutError: if the experiment does not apply to that model.
        """
        return Planned(self.quick_on(own))

    def quick_on(self, own: OwnModel, **changed: Any) -> OptionsT:
        """The quick options with the user's model, its dtype and device, and the fields `changed`.

        Raises:
            LeftOutError: if the options have no field `model`.
        """
        quick: Any = self.quick
        if not hasattr(quick, "model"):
            raise LeftOutError(self.left_out)
        model = (own.model,) if isinstance(quick.model, tuple) else own.model
        loaded = {"dtype": own.dtype, "device": own.device, "attn_implementation": own.attn}
        loaded = {name: value for name, value in loaded.items() if hasattr(quick, name)}
        return replace(quick, model=model, **(loaded | changed))

    @abstractmethod
    def findings(self, tables: Tables) -> list[Finding]:
        """The findings; the first one answers the question."""

    def views(self, tables: Tables) -> list[ResultTable]:
        """Tables and notes for readers."""
        return []

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """Figures by name, the stem of the SVG file; the first one shows the first finding.

        Each has a label (`Figure.set_label`) that says what it shows.
        """
        return {}

    def contrasts(self, tables: Tables) -> list[Contrast]:
        """Contrasts for the report's first figure."""
        return []

    def passed(self, tables: Tables) -> bool:
        """Whether the command exits with status 0."""
        return True

    def markdown(self, tables: Tables) -> str:
        """Findings and views as Markdown."""
        findings = " ".join(finding.text for finding in self.findings(tables))
        return "\n\n".join([findings, *(view.markdown() for view in self.views(tables))]) + "\n"


AnyExperiment = Experiment[Any]
"""An experiment with any type of options."""
