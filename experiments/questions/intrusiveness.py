"""What a mechanism touches, how far that reaches, and what it leaves.

Every mechanism (`experiments.mechanisms`), and presses of both mechanisms that need more than
a look at the keys, are audited (`experiments.audit`) on a small model: what differs while the scope
is open, in the middle of a call, and after each way of leaving it. Real libraries are audited in
the same way, in environments that have them (`experiments.interventions`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
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
from experiments.framework.wording import in_one_line
from experiments.interventions import LIBRARIES
from experiments.mechanisms import OURS, TRIED, Opens, contained
from experiments.mechanisms.scenarios import answer
from experiments.testbed.families import build

ENVIRONMENTS = (".venv-subjects", ".venv-oldest")
"""Where the libraries under audit may be installed, beside this package."""
_PYTHON = "bin/python"
ROOT = Path(__file__).parents[2]


def _has_python(environment: Path) -> bool:
    return (environment / _PYTHON).exists()


@dataclass(frozen=True)
class Options:
    """Where to look for libraries."""

    environment: Annotated[
        tuple[Path, ...],
        typer.Option(
            help="Virtual environment with libraries to audit. Repeatable.",
            show_default=f"{' and '.join(ENVIRONMENTS)} where they are",
            callback=checking(
                _has_python, "{} holds no virtual environment: there is no bin/python in it"
            ),
        ),
    ] = ()


class PlantedError(RuntimeError):
    """Raised on purpose."""


# ---- what is touched ---------------------------------------------------------------------------


def touched(opens: Opens) -> pd.DataFrame:
    """Changes of one kind counted, on a model of its own; see `Audit.by_kind`."""
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
    """How much is left after a way of leaving, an example, and the error that leaving raised."""
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
    """What libraries touch and leave, each as audited in the first environment that has it.

    Args:
        audited: what `audit_libraries` found in several environments.

    Returns:
        Columns `library`, `version`, `transformers`, `subject`, `when`, `reach`, `how`, `kind`,
        `changes`, `example`, `error`. A subject that changes nothing has a row without changes, one
        that could not be audited a row that says why.
    """
    subjects = chain.from_iterable(audited)
    rows = [row | change for row in subjects for change in row["changes"] or [{"changes": 0}]]
    found = pd.DataFrame(rows, columns=_SUBJECT_COLUMNS)
    newest = found.groupby("library")["transformers"].transform("first")
    error = "not run: none of the environments has it; `make subjects` installs it"
    absent = [library for library in LIBRARIES if library not in set(found["library"])]
    missing = pd.DataFrame({"library": absent, "subject": "", "error": error})
    return pd.concat([found[found["transformers"] == newest], missing], ignore_index=True)


def audit_libraries(environment: Path) -> list[dict[str, Any]]:
    """What `python -m experiments.interventions` prints there.

    Raises:
        UserError: if it fails.
    """
    printed = shared.printed_by(environment / _PYTHON, "experiments.interventions")
    return json.loads(printed.splitlines()[-1])


# ---- reading the tables ------------------------------------------------------------------------


def by_reach(table: pd.DataFrame, names: list[str], *when: str) -> pd.DataFrame:
    """Changes counted by `names` (rows) and reach (columns); imports are not counted."""
    chosen = table[table["when"].isin(when) & (table["kind"] != "imported module")]
    counted = chosen.groupby([*names, "reach"])["changes"].sum().unstack(fill_value=0)
    rows = table.drop_duplicates(names).set_index(names)[[]]
    return rows.join(counted).reindex(columns=list(REACHES)).fillna(0).astype(int)


def _left(exits: pd.DataFrame, ours: bool) -> pd.Series[int]:
    """What mechanisms leave behind, summed over all ways of leaving."""
    left = exits.groupby("mechanism", sort=False)["leftovers"].sum()
    return left[left.index.map(lambda name: (name.split(",")[0] in OURS) == ours)]


def _library_table(libraries: pd.DataFrame) -> ResultTable:
    """What libraries touch and leave; of those that were not audited, why."""
    note = "Libraries: entries that differ while open, and those that are left, by reach."
    keys = ["library", "version", "subject", "error"]
    told = libraries.fillna(dict.fromkeys(keys, ""))
    found = by_reach(told, keys, LEFT).drop(columns=CALL).add_prefix("left: ")
    found.insert(0, "while open", by_reach(told, keys, OPEN).sum(axis=1))
    return frame_table(note, found.reset_index(), None)


class Intrusiveness(Experiment[Options]):
    """Audit what each mechanism, and each library, touches, and what it leaves behind.

    What does each mechanism touch while it is open, how far does that reach, and what does it
    leave?

    Snapshots of everything that can be reached from a small Llama and its process (hooks,
    attributes, classes, globals of modeling files, registries, configurations, weights,
    settings) are taken before, inside, in the middle of a call, and after. An entry counts if
    it is another object or has another value. Each scope is left in five ways, among them an
    error and an interrupt. Other versions of the libraries may touch other entries, and what
    C++ hides from Python is not seen.
    """

    name = "intrusiveness"
    title = "What is touched, and what is left"
    evidence = Evidence.STATE
    full = quick = Options()
    left_out = "what a mechanism touches is the same on every model; `make study` tells"
    claims: ClassVar = {"left": Claim(Options(environment=(Path(sys.prefix),)))}

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Everything about every mechanism, and about the libraries that environments have.

        Returns:
            `intrusiveness`: changes by mechanism, `when`, `reach`, `how` and `kind`;
            `intrusiveness_exits`: what is left by mechanism and `exit`;
            `intrusiveness_libraries`: see `of_libraries`.
        """
        found = [*filter(_has_python, map(ROOT.joinpath, ENVIRONMENTS))]
        changes, exits = [], []
        with ThreadPoolExecutor() as pool:
            libraries = pool.map(audit_libraries, options.environment or found)
            for name in progress.track(TRIED, description=self.name):
                changes.append(touched(TRIED[name]).assign(mechanism=name))
                exits += [{"mechanism": name, **leftovers(TRIED[name], how)} for how in EXITS]
        table = pd.concat(changes, ignore_index=True)
        return {
            "intrusiveness": table[["mechanism", *table.columns.drop("mechanism")]],
            "intrusiveness_exits": pd.DataFrame(exits),
            "intrusiveness_libraries": of_libraries(libraries),
        }

    def findings(self, tables: Tables) -> list[Finding]:
        exits = tables["intrusiveness_exits"]
        own, others = (_left(exits, ours) for ours in (True, False))
        text = (
            f"Hooks and patches leave **{own.sum()}** entries behind, whichever of "
            f"{exits['exit'].nunique()} ways their scope is left; {(others > 0).sum()} of "
            f"{len(others)} other mechanisms leave some."
        )
        need = "get the model back as it was"
        return [Finding("left", text, need, "breaks" if own.sum() else "works")]

    def views(self, tables: Tables) -> list[ResultTable]:
        changes, exits = tables["intrusiveness"], tables["intrusiveness_exits"]
        left = [f"{name} ({n})" for name, n in _left(exits, ours=False).items() if n]
        note = (
            "Entries that differ from before, on a Llama of two layers. Of the other mechanisms "
            f"something is left by {', '.join(left) or 'none'}."
        )
        touched = by_reach(changes, ["mechanism"], OPEN, RUNNING)
        touched["left, at most"] = exits.groupby("mechanism")["leftovers"].max()
        kinds = changes[changes["when"] == OPEN].groupby("mechanism")["kind"].unique()
        touched["what"] = kinds.map(", ".join).reindex(touched.index, fill_value="")
        of_libraries = _library_table(tables["intrusiveness_libraries"])
        return [frame_table(note, touched.reset_index(), None), of_libraries]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """Two heat maps side by side: what is touched, and what is left."""
        exits = tables["intrusiveness_exits"]
        left = exits.pivot_table("leftovers", "mechanism", "exit", sort=False)
        touched = by_reach(tables["intrusiveness"], ["mechanism"], OPEN, RUNNING).loc[left.index]
        panels = {"touched while open, by reach": touched, "left behind, by way of leaving": left}
        label = "Entries that mechanisms touch while open, by reach, and leave, by way of leaving"
        return {"intrusiveness": heat_maps(panels, label, "{:.0f}", columns=2)}

    def contrasts(self, tables: Tables) -> list[Contrast]:
        own, others = (_left(tables["intrusiveness_exits"], ours) for ours in (True, False))
        bars = {name: float(own[own.index.str.startswith(name)].sum()) for name in OURS}
        bars |= {str(name): float(count) for name, count in others.nlargest(1).items()}
        return [Contrast("Entries left behind", bars)]


EXPERIMENT = Intrusiveness()
