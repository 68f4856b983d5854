"""What each mechanism changes, how far the changes reach, and what remains after its scope.

Every mechanism (`experiments.mechanisms`), and hooks and patches also with presses that read
queries or keep different tokens per head, is audited (`experiments.audit`) on a small model: what
differs while the scope is open, in the middle of a call, and after each way of leaving the scope.
Real libraries are audited in the same way, in environments that have them installed
(`experiments.interventions`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import PreTrainedModel

from experiments.audit import CALL, LEFT, OPEN, REACHES, RUNNING, audit, differences, snapshot
from experiments.framework import shared
from experiments.framework.experiment import Claim, Contrast, Evidence, Experiment, Finding, Tables
from experiments.framework.frames import frame_table, heat_maps
from experiments.framework.options import checking
from experiments.framework.tables import ResultTable
from experiments.framework.wording import in_one_line, sentences
from experiments.interventions import LIBRARIES
from experiments.mechanisms import OURS, TRIED, Opens, contained
from experiments.mechanisms.scenarios import answer
from experiments.testbed.families import build

ENVIRONMENTS = (".venv-subjects", ".venv-oldest")
"""Virtual environments, in the root of the repository, that may have the audited libraries."""
_PYTHON = "bin/python"
_finding = sentences(__file__)


def _has_python(environment: Path) -> bool:
    return (environment / _PYTHON).exists()


@dataclass(frozen=True)
class Options:
    """Where the libraries are installed."""

    environment: Annotated[
        tuple[Path, ...],
        typer.Option(
            help="Virtual environment with libraries to audit. Repeatable.",
            show_default=f"{' and '.join(ENVIRONMENTS)}, if make has installed them",
            callback=checking(_has_python, "{} has no bin/python: it is no virtual environment"),
        ),
    ] = ()

    @property
    def environments(self) -> Iterable[Path]:
        """The given environments, or those that make has installed to the end."""
        made = (shared.ROOT / name for name in ENVIRONMENTS)
        return self.environment or [each for each in made if (each / ".installed").exists()]


class PlantedError(RuntimeError):
    """Raised on purpose."""


# ---- what is touched ---------------------------------------------------------------------------


def touched(opens: Opens) -> pd.DataFrame:
    """What a mechanism changes on a new small Llama, counted by kind: see `Audit.by_kind`."""
    model = build("llama")
    with contained(model):
        return audit(opens(model), model).by_kind()


# ---- what is left ------------------------------------------------------------------------------


def _at_its_end(model: PreTrainedModel, opens: Opens) -> None:
    with opens(model):
        answer(model)


def _by_an_error(error: type[BaseException], model: PreTrainedModel, opens: Opens) -> None:
    def explode(*_: Any) -> None:
        raise error

    projection = model.model.layers[1].self_attn.o_proj
    with projection.register_forward_pre_hook(explode), suppress(error):
        _at_its_end(model, opens)


def _by_closing_a_generator(model: PreTrainedModel, opens: Opens) -> None:
    def stream() -> Generator[None]:
        with opens(model):
            answer(model)
            yield

    with closing(stream()) as steps:
        next(steps)


def _out_of_order(model: PreTrainedModel, opens: Opens) -> None:
    outer, inner = opens(model), opens(model)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    answer(model)
    inner.__exit__(None, None, None)


EXITS: dict[str, Callable[[PreTrainedModel, Opens], None]] = {
    "end of the block": _at_its_end,
    "error in a layer": partial(_by_an_error, PlantedError),
    "interrupt in a layer": partial(_by_an_error, KeyboardInterrupt),
    "generator closed": _by_closing_a_generator,
    "outer scope first": _out_of_order,
}
"""Ways to leave a scope."""


def leftovers(opens: Opens, exit_name: str) -> dict[str, Any]:
    """Number of entries that still differ after `exit_name`, an example, and any error raised."""
    model, error = build("llama"), ""
    with contained(model):
        answer(model)
        before = snapshot(model)
        try:
            EXITS[exit_name](model, opens)
        except Exception as raised:
            error = in_one_line(raised)
        left = differences(before, snapshot(model))
    example = f"{left[0].place.owner}.{left[0].place.name}" if left else ""
    return {"exit": exit_name, "leftovers": len(left), "example": example, "error": error}


# ---- libraries ---------------------------------------------------------------------------------


_SUBJECT_COLUMNS = [
    *("library", "version", "transformers", "subject"),
    *("when", "reach", "how", "kind", "changes", "example", "error"),
]


def of_libraries(audited: Iterable[list[dict[str, Any]]]) -> pd.DataFrame:
    """What libraries change and leave behind, each audited in the first environment that has it.

    Args:
        audited: the results of `audit_libraries`, one per environment.

    Returns:
        Columns `library`, `version`, `transformers`, `subject`, `when`, `reach`, `how`, `kind`,
        `changes`, `example`, `error`. A subject that changes nothing has one row with 0 `changes`;
        one that could not be audited has one row with an `error`.
    """
    rows: list[dict[str, Any]] = []
    for subjects in audited:
        known = {row["library"] for row in rows}
        new = [subject for subject in subjects if subject["library"] not in known]
        rows += [row | change for row in new for change in row["changes"] or [{"changes": 0}]]
    found = pd.DataFrame(rows, columns=_SUBJECT_COLUMNS)
    error = "not run: none of the environments has it; `make subjects` installs it"
    absent = [library for library in LIBRARIES if library not in set(found["library"])]
    missing = pd.DataFrame({"library": absent, "subject": "", "error": error})
    return pd.concat([found, missing], ignore_index=True)


def audit_libraries(environment: Path) -> list[dict[str, Any]]:
    """Run `python -m experiments.interventions` in an environment and parse what it prints.

    Raises:
        UserError: if the command fails.
    """
    printed = shared.printed_by(environment / _PYTHON, "experiments.interventions")
    return json.loads(printed.splitlines()[-1])


# ---- reading the tables ------------------------------------------------------------------------


def by_reach(table: pd.DataFrame, names: list[str], *when: str) -> pd.DataFrame:
    """Number of changes by the columns `names` (rows) and reach (columns), without imports."""
    chosen = table[table["when"].isin(when) & (table["kind"] != "imported module")]
    counted = chosen.groupby([*names, "reach"])["changes"].sum().unstack(fill_value=0)
    rows = table.drop_duplicates(names).set_index(names)[[]]
    return rows.join(counted).reindex(columns=list(REACHES)).fillna(0).astype(int)


def _left(exits: pd.DataFrame, ours: bool) -> pd.Series[int]:
    """Entries left behind per mechanism, summed over the ways to leave; ours, or all others."""
    left = exits.groupby("mechanism", sort=False)["leftovers"].sum()
    return left[left.index.map(lambda name: (name.split(",")[0] in OURS) == ours)]


def _library_table(libraries: pd.DataFrame) -> ResultTable:
    """What libraries change and leave behind, or why they were not audited."""
    note = "Libraries: entries that differ while the scope is open, and entries left, by reach."
    keys = ["library", "version", "subject", "error"]
    filled = libraries.fillna(dict.fromkeys(keys, ""))
    found = by_reach(filled, keys, LEFT).drop(columns=CALL).add_prefix("left: ")
    found.insert(0, "while open", by_reach(filled, keys, OPEN).sum(axis=1))
    return frame_table(note, found.reset_index(), None)


class Intrusiveness(Experiment[Options]):
    """Audit what each mechanism, and each library, changes, and what it leaves behind.

    What does each mechanism change while its scope is open, how far do the changes reach, and
    what remains after the scope?

    Snapshots of everything reachable from a two-layer Llama and from its process (hooks,
    attributes, classes, globals of modeling files, registries, configurations, weights,
    settings) are taken before the scope, inside it, in the middle of a call, and after it. An
    entry counts as changed if it is a different object or has a different value. Each scope is
    left in five ways, among them an exception in a layer, a keyboard interrupt and a generator
    that is closed early. The other mechanisms are in their simplest form: that a permanent class
    patch stays is its nature, and a careful form of the others may leave nothing. Other versions of
    the libraries may change other entries, and state in C++ that Python cannot read is not seen.
    """

    name = "intrusiveness"
    title = "What each mechanism changes and leaves behind"
    evidence = Evidence.STATE
    full = quick = Options()
    left_out = "what a mechanism changes does not depend on the model; `make study` measures it"
    claims: ClassVar = {"left": Claim(Options(environment=(Path(sys.prefix),)))}

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Audit every mechanism, and the libraries that the environments have.

        Returns:
            `intrusiveness`: changes by mechanism, `when`, `reach`, `how` and `kind`;
            `intrusiveness_exits`: entries left behind by mechanism and `exit`;
            `intrusiveness_libraries`: see `of_libraries`.
        """
        changes, exits = [], []
        audited = partial(shared.or_left_out, progress, "libraries", audit_libraries)
        with ThreadPoolExecutor() as pool:
            libraries = pool.map(audited, options.environments)
            for name in progress.track(TRIED, description=self.name):
                changes.append(touched(TRIED[name]).assign(mechanism=name))
                exits += [{"mechanism": name, **leftovers(TRIED[name], how)} for how in EXITS]
        table = pd.concat(changes, ignore_index=True)
        return {
            "intrusiveness": table[["mechanism", *table.columns.drop("mechanism")]],
            "intrusiveness_exits": pd.DataFrame(exits),
            "intrusiveness_libraries": of_libraries(filter(None, libraries)),
        }

    def findings(self, tables: Tables) -> list[Finding]:
        exits = tables["intrusiveness_exits"]
        own, others = (_left(exits, ours) for ours in (True, False))
        said = {"left": own.sum(), "some": (others > 0).sum(), "n": len(others)}
        verdict = "breaks" if said["left"] else "works"
        return [_finding("left", verdict, exits=exits["exit"].nunique(), **said)]

    def views(self, tables: Tables) -> list[ResultTable]:
        changes, exits = tables["intrusiveness"], tables["intrusiveness_exits"]
        left = [f"{name} ({n})" for name, n in _left(exits, ours=False).items() if n]
        note = (
            "Entries that differ from the snapshot before the scope, on a two-layer Llama. Of the "
            f"other mechanisms, something is left by {', '.join(left) or 'none'}."
        )
        touched = by_reach(changes, ["mechanism"], OPEN, RUNNING)
        touched["left, at most"] = exits.groupby("mechanism")["leftovers"].max()
        kinds = changes[changes["when"] == OPEN].groupby("mechanism")["kind"].unique()
        touched["what"] = kinds.map(", ".join).reindex(touched.index, fill_value="")
        of_libraries = _library_table(tables["intrusiveness_libraries"])
        return [frame_table(note, touched.reset_index(), None), of_libraries]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """Two heat maps: entries changed while open, and entries left behind."""
        exits = tables["intrusiveness_exits"]
        left = exits.pivot_table("leftovers", "mechanism", "exit", sort=False)
        touched = by_reach(tables["intrusiveness"], ["mechanism"], OPEN, RUNNING).loc[left.index]
        panels = {"changed while open": touched, "left behind": left}
        label = "Entries changed while the scope is open, by reach, and left behind, by exit"
        return {"intrusiveness": heat_maps(panels, label, "{:.0f}")}

    def contrasts(self, tables: Tables) -> list[Contrast]:
        own, others = (_left(tables["intrusiveness_exits"], ours) for ours in (True, False))
        bars = {name: float(own[own.index.str.startswith(name)].sum()) for name in OURS}
        bars |= {str(name): float(count) for name, count in others.nlargest(1).items()}
        return [Contrast("Entries left behind", bars)]


EXPERIMENT = Intrusiveness()
