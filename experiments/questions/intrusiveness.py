"""What a mechanism touches, how far that reaches, and what it leaves.

Every mechanism (`experiments.mechanisms`), and presses of both mechanisms that need more than
a look at the keys, are audited (`experiments.audit`) on a small model: what differs while the scope
is open, in the middle of a call, and after each way of leaving it. What can be seen from inside is
noted too: what `inspect` says of the forward, what a traceback and a profile show. Real libraries
are audited in the same way, in environments that have them (`experiments.interventions`).
"""

from __future__ import annotations

import cProfile
import inspect
import json
import pstats
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.audit import LEFT, OPEN, REACHES, RUNNING, audit, differences, snapshot
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Contrast, Experiment, Finding, Related, Tables
from experiments.framework.heatmap import draw_cells
from experiments.framework.plots import new_figure, style
from experiments.framework.tables import ResultTable
from experiments.framework.wording import in_one_line
from experiments.framework.works import KVPRESS
from experiments.interventions import LIBRARIES
from experiments.mechanisms import MECHANISMS, OURS
from experiments.mechanisms.contain import contained
from experiments.testbed.families import build

RATIO = 0.5
ENVIRONMENTS = (".venv-subjects", ".venv-oldest")
"""Where the libraries under audit may be installed, beside this package."""
INSTALL = "make subjects"
BARE = "bare"
ROOT = Path(__file__).parents[2]

Opens = Callable[[PreTrainedModel], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Options:
    """Where to look for libraries."""

    environment: Annotated[
        tuple[Path, ...],
        typer.Option(
            help="Virtual environment with libraries to audit. Repeatable.",
            show_default=f"{' and '.join(ENVIRONMENTS)} where they are",
        ),
    ] = ()


class PlantedError(RuntimeError):
    """Raised on purpose."""


def mechanisms() -> dict[str, Opens]:
    """What is audited, by name: every mechanism, and presses that need more than the keys."""
    opened: dict[str, Opens] = {
        name: mechanism.press(RATIO) for name, mechanism in MECHANISMS.items()
    }
    for name, package in zip(OURS, (hooks_impl, patch_impl), strict=True):
        snapkv = package.SnapKVPress(compression_ratio=RATIO, window_size=4)
        opened[f"{name}, SnapKV"] = snapkv
        opened[f"{name}, AdaKV(SnapKV)"] = package.AdaKVPress(snapkv)
    return opened


# ---- what is touched ---------------------------------------------------------------------------


def touched(opens: Opens) -> pd.DataFrame:
    """Changes of one kind counted, on a model of its own; see `Audit.by_kind`."""
    model = build("llama")
    with contained(model):
        return audit(opens(model), model).by_kind()


# ---- what is left ------------------------------------------------------------------------------


@torch.no_grad()
def _run(model: PreTrainedModel) -> None:
    """A prefill and a step: whatever acts one forward late acts too."""
    cache = DynamicCache()
    for length, start in ((24, 0), (1, 24)):
        ids = torch.arange(start, start + length)
        model(3 + ids[None], position_ids=ids[None], past_key_values=cache)


def _at_its_end(model: PreTrainedModel, opens: Opens) -> None:
    with opens(model):
        _run(model)


def _by_an_error(error: type[BaseException]) -> Callable[[PreTrainedModel, Opens], None]:
    def leave(model: PreTrainedModel, opens: Opens) -> None:
        def explode(*_: Any) -> None:
            raise error

        projection = model.model.layers[1].self_attn.o_proj
        broken = projection.register_forward_pre_hook(explode)
        try:
            with suppress(error), opens(model):
                _run(model)
        finally:
            broken.remove()

    return leave


def _by_closing_a_generator(model: PreTrainedModel, opens: Opens) -> None:
    def stream() -> Generator[None]:
        with opens(model):
            _run(model)
            yield

    steps = stream()
    next(steps)
    steps.close()


def _out_of_order(model: PreTrainedModel, opens: Opens) -> None:
    outer, inner = opens(model), opens(model)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    _run(model)
    inner.__exit__(None, None, None)


EXITS: dict[str, Callable[[PreTrainedModel, Opens], None]] = {
    "end of the block": _at_its_end,
    "error in a layer": _by_an_error(PlantedError),
    "interrupt in a layer": _by_an_error(KeyboardInterrupt),
    "generator closed": _by_closing_a_generator,
    "outer scope first": _out_of_order,
}
"""Ways to leave a scope."""


def leftovers(opens: Opens, exit_name: str) -> dict[str, Any]:
    """How much is left after a way of leaving, an example, and the error that leaving raised."""
    model, error = build("llama"), ""
    with contained(model):
        _run(model)
        before = snapshot(model)
        try:
            EXITS[exit_name](model, opens)
        except Exception as raised:
            error = in_one_line(raised)
        left = differences(before, snapshot(model))
    example = f"{left[0].place.owner}.{left[0].place.name}" if left else ""
    return {"exit": exit_name, "leftovers": len(left), "example": example, "error": error}


# ---- what can be seen from inside --------------------------------------------------------------


def seen_from_inside(name: str | None) -> dict[str, Any]:
    """What Python says of an attention module while a mechanism is open on its model.

    Args:
        name: of a mechanism, or None for the bare model.
    """
    model = build("llama")
    attention = model.model.layers[0].self_attn
    function = type(attention).forward
    signature, source = inspect.signature(attention.forward), inspect.getsource(attention.forward)

    def opened(score: Any = None) -> AbstractContextManager[Any]:
        if name is None:
            return nullcontext()
        press = MECHANISMS[name].press
        return (press(RATIO) if score is None else press(RATIO, score))(model)

    with contained(model):
        with opened():
            forward = attention.forward
            row = {
                "signature": inspect.signature(forward) == signature,
                "source": inspect.getsource(forward) == source,
                "name": forward.__qualname__ == function.__qualname__,
                "method": inspect.ismethod(forward) and forward.__func__ is function,
                "class": type(attention).__name__,
                "called by": _caller_in_profile(model, function),
            }
        row["frames to an error of the layer"] = _frames_to_layer_error(model, opened)
        row["frames to an error of the press"], row["path"] = _frames_to_press_error(model, opened)
    return row


def _caller_in_profile(model: PreTrainedModel, function: Any) -> str:
    """What a profile names as the Python function that calls the forward of the class."""
    with cProfile.Profile() as profile:
        _run(model)
    code = function.__code__
    entry = code.co_filename, code.co_firstlineno, code.co_name
    callers = pstats.Stats(profile).stats[entry][4]  # type: ignore[attr-defined]
    return ", ".join(sorted({f"{name} ({Path(file).name})" for file, _, name in callers}))


def _frames_to_layer_error(model: PreTrainedModel, opened: Any) -> int:
    """Frames of a traceback between the decoder layer and an error in its attention's output."""
    attention = model.model.layers[0].self_attn

    def explode(*_: Any) -> None:
        raise PlantedError

    with attention.o_proj.register_forward_pre_hook(explode):
        path = _path_to_error(model, opened())
    return len(path)


def _frames_to_press_error(model: PreTrainedModel, opened: Any) -> tuple[int, str]:
    """Frames between the decoder layer and an error in the press's formula, and their functions."""

    def score(keys: Tensor) -> Tensor:
        raise PlantedError

    path = _path_to_error(model, opened(score))
    return len(path), " > ".join(path)


def _path_to_error(model: PreTrainedModel, scope: AbstractContextManager[Any]) -> list[str]:
    """Functions between the last decoder layer in a traceback and what raised; empty without."""
    path: list[str] = []
    try:
        with scope:
            _run(model)
    except PlantedError as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            path.append(frame.f_code.co_name)
            if frame.f_locals.get("self") in list(model.model.layers):
                path.clear()
    return path[:-1]


# ---- libraries ---------------------------------------------------------------------------------


def audit_libraries(environments: Sequence[Path]) -> pd.DataFrame:
    """What libraries touch and leave, each audited in the first environment that has it.

    Args:
        environments: folders of virtual environments, with this package's dependencies.

    Returns:
        Columns `library`, `version`, `transformers`, `subject`, `when`, `reach`, `how`, `kind`,
        `changes`, `example`, `error`. A subject that changes nothing has a row without changes, one
        that could not be audited a row that says why.
    """
    with ThreadPoolExecutor() as pool:
        audited = [row for rows in pool.map(_audit_in, environments) for row in rows]
    rows: list[dict[str, Any]] = []
    for library in LIBRARIES:
        own = [row for row in audited if row["library"] == library.distribution]
        # The first environment that has it decides.
        own = [row for row in own if row["transformers"] == own[0]["transformers"]]
        if not own:
            error = f"not run: none of the environments has it; `{INSTALL}` installs it"
            rows.append({"library": library.distribution, "subject": "", "error": error})
        for row in own:
            changes = row.pop("changes")
            rows += [{**row, **change} for change in changes] or [{**row, "changes": 0}]
    return pd.DataFrame(rows, columns=_SUBJECT_COLUMNS)


_SUBJECT_COLUMNS = [
    *("library", "version", "transformers", "subject"),
    *("when", "reach", "how", "kind", "changes", "example", "error"),
]


def _audit_in(environment: Path) -> list[dict[str, Any]]:
    """What `python -m experiments.interventions` prints there; nothing where there is no Python.

    Raises:
        UserError: if it fails.
    """
    python = environment / "bin" / "python"
    if not python.exists():
        return []
    command = [str(python), "-m", "experiments.interventions"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UserError(f"auditing the libraries in {environment} failed: {reason}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


# ---- reading the tables ------------------------------------------------------------------------


def by_reach(table: pd.DataFrame, names: list[str], when: str) -> pd.DataFrame:
    """Changes counted by `names` (rows) and reach (columns); imports are not counted."""
    chosen = table[(table["when"] == when) & (table["kind"] != "imported module")]
    counted = chosen.groupby([*names, "reach"])["changes"].sum().unstack(fill_value=0)
    rows = table[names].drop_duplicates()
    index = pd.MultiIndex.from_frame(rows) if len(names) > 1 else pd.Index(rows[names[0]])
    return counted.reindex(index=index, columns=list(REACHES), fill_value=0).astype(int)


def _while_open(changes: pd.DataFrame) -> pd.DataFrame:
    by_mechanism = by_reach(changes, ["mechanism"], OPEN)
    return by_mechanism.add(by_reach(changes, ["mechanism"], RUNNING))


def _left(exits: pd.DataFrame, ours: bool) -> pd.Series[int]:
    """What mechanisms leave behind, summed over all ways of leaving."""
    left = exits.groupby("mechanism", sort=False)["leftovers"].sum()
    return left[left.index.map(lambda name: (name.split(",")[0] in OURS) == ours)]


_TITLE_PAD = 80
"""Points that slanted labels need above a matrix."""
_OPEN_COLOURS = ("#d7e6f2", "#8dbbdd", "#3f8ac4", "#0b5394")
_LEFT_COLOURS = ("#fbe0cf", "#f4ae84", "#e2783b", "#D55E00")


def _shade(count: int, colours: tuple[str, ...]) -> tuple[str, str]:
    """Text and colour of a count: the more digits, the darker."""
    if not count:
        return "0", "#f5f5f5"
    return str(count), colours[min(len(colours), len(str(count)) + (count > 4)) - 1]


def _mechanisms_figure(tables: Tables) -> Figure:
    changes, exits = tables["intrusiveness"], tables["intrusiveness_exits"]
    left = exits.pivot(index="mechanism", columns="exit", values="leftovers")
    names, ways = exits["mechanism"].unique(), exits["exit"].unique()
    label = (
        "Entries touched while a scope is open, by mechanism and reach, and entries left behind, "
        "by mechanism and way of leaving"
    )
    touched_names = _while_open(changes).loc[names]
    return _figure(touched_names, left.loc[names, ways], label, "by way of leaving")


def _libraries_figure(audited: pd.DataFrame) -> Figure:
    opened, left = (by_reach(audited, ["library", "subject"], when) for when in (OPEN, LEFT))
    for counts in (opened, left):
        counts.index = pd.Index([f"{library}: {subject}" for library, subject in counts.index])
    label = "Entries that libraries touch and leave behind, by reach"
    return _figure(opened, left, label, "by reach")


def _figure(opened: pd.DataFrame, left: pd.DataFrame, label: str, left_by: str) -> Figure:
    """Two matrices side by side: what is touched, and what is left."""
    with style():
        height = 1.7 + 0.26 * len(opened)
        figure, panels = new_figure(1, 2, width=9.4, height=height, sharey=True)
        titles = "touched while open, by reach", f"left behind, {left_by}"
        matrices = zip(panels, titles, (opened, left), (_OPEN_COLOURS, _LEFT_COLOURS), strict=True)
        for panel, title, counts, colours in matrices:
            panel.set_title(title, y=1, pad=_TITLE_PAD)
            cells = {
                (str(row), str(column)): _shade(count, colours)
                for row, of_row in counts.to_dict("index").items()
                for column, count in of_row.items()
            }
            draw_cells(panel, list(counts.index), list(counts.columns), cells)
    figure.set_label(label)
    return figure


def _touched_table(changes: pd.DataFrame, exits: pd.DataFrame) -> pd.DataFrame:
    opened = _while_open(changes)
    opened["left, at most"] = exits.groupby("mechanism")["leftovers"].max()
    kinds = changes[changes["when"] == OPEN].groupby("mechanism")["kind"].agg(_listed)
    opened["what"] = kinds.reindex(opened.index, fill_value="")
    return opened.reset_index()


def _listed(kinds: pd.Series[str]) -> str:
    return ", ".join(dict.fromkeys(kinds))


_LAYER, _PRESS = "frames to an error of the layer", "frames to an error of the press"


def _inside_table(inside: pd.DataFrame) -> pd.DataFrame:
    shown = inside.drop(index=BARE)
    columns = {"signature": "signature", "source": "source", "name": "qualified name"}
    table = pd.DataFrame(
        {
            title: shown[name].map({True: "same", False: "differs"})
            for name, title in columns.items()
        }
    )
    table["class's own method"] = shown["method"].map({True: "yes", False: "no"})
    table["frames, layer"] = shown[_LAYER].astype(int)
    table["frames, press"] = shown[_PRESS].astype(int)
    table["called by, in a profile"] = shown["called by"]
    return table.reset_index()


def _library_tables(libraries: pd.DataFrame) -> list[ResultTable]:
    """What was audited, and what was not and why, as far as there are such."""
    failed = libraries[libraries["error"].fillna("") != ""]
    audited = libraries.drop(index=failed.index)
    tables = []
    if not audited.empty:
        keys = ["library", "version", "subject"]
        left = by_reach(audited, keys, LEFT).drop(columns=REACHES[0])
        left = left.add_prefix("left: ")
        left.insert(0, "while open", by_reach(audited, keys, OPEN).sum(axis=1))
        note = (
            "Libraries, audited in the same way: entries that differ while open (all reaches), "
            "and those that are left, by reach. Modules that an import loads are not counted."
        )
        tables.append(_result(note, left.reset_index()))
    if not failed.empty:
        shown = failed[["library", "subject", "error"]].fillna("")
        tables.append(_result("Libraries that were not audited:", shown))
    return tables


def _result(note: str, table: pd.DataFrame) -> ResultTable:
    return ResultTable(note, list(table.columns), list(table.itertuples(index=False)), left=None)


class Intrusiveness(Experiment[Options]):
    """Audit what each mechanism, and each library, touches, and what it leaves behind."""

    name = "intrusiveness"
    title = "What is touched, and what is left"
    question = (
        "What does each mechanism touch while it is open, how far does that reach, and what does "
        "it leave?"
    )
    method = (
        "Snapshots of everything that can be reached from a small Llama and its process (hooks, "
        "attributes, classes, globals of modeling files, registries, configurations, weights, "
        "settings) are taken before, inside, in the middle of a call, and after. An entry counts "
        "if it is another object or has another value. Each scope is left in five ways, among "
        "them an error and an interrupt. Other versions of the libraries may touch other entries, "
        "and what C++ hides from Python is not seen."
    )
    evidence = Evidence.STATE
    full = quick = Options()
    left_out = "what a mechanism touches is the same on every model; `make study` tells"
    claims: ClassVar = {
        "left": Claim(Options(environment=(Path(sys.prefix),))),
    }

    def measure(self, options: Options, progress: Progress) -> Tables:
        """Everything about every mechanism, and about the libraries that environments have.

        Returns:
            `intrusiveness`: changes by mechanism, `when`, `reach`, `how` and `kind`;
            `intrusiveness_exits`: what is left by mechanism and `exit`;
            `intrusiveness_inside`: what can be seen from inside, by mechanism;
            `intrusiveness_libraries`: see `audit_libraries`.
        """
        for folder in options.environment:
            if not (folder / "bin" / "python").exists():
                raise UserError(
                    f"{folder} holds no virtual environment: there is no bin/python in it"
                )
        environments = options.environment or [ROOT / name for name in ENVIRONMENTS]
        opened = mechanisms()
        changes, exits, inside = [], [], [{"mechanism": BARE, **seen_from_inside(None)}]
        with ThreadPoolExecutor(1) as pool:
            libraries = pool.submit(audit_libraries, environments)
            for name in progress.track(opened, description=self.name):
                changes.append(touched(opened[name]).assign(mechanism=name))
                exits += [{"mechanism": name, **leftovers(opened[name], how)} for how in EXITS]
                if name in MECHANISMS:
                    inside.append({"mechanism": name, **seen_from_inside(name)})
            found = libraries.result()
        table = pd.concat(changes, ignore_index=True)
        return {
            "intrusiveness": table[["mechanism", *table.columns.drop("mechanism")]],
            "intrusiveness_exits": pd.DataFrame(exits),
            "intrusiveness_inside": pd.DataFrame(inside),
            "intrusiveness_libraries": found,
        }

    def findings(self, tables: Tables) -> list[Finding]:
        exits = tables["intrusiveness_exits"]
        own, others = _left(exits, ours=True), _left(exits, ours=False)
        text = (
            f"Hooks and patches leave **{own.sum()}** entries behind, whichever of "
            f"{exits['exit'].nunique()} ways their scope is left; {(others > 0).sum()} of "
            f"{len(others)} other mechanisms leave some."
        )
        verdict: Any = "breaks" if own.sum() else "works"
        return [Finding("left", text, "get the model back as it was", verdict)]

    def views(self, tables: Tables) -> list[ResultTable]:
        changes, exits = tables["intrusiveness"], tables["intrusiveness_exits"]
        inside = tables["intrusiveness_inside"].set_index("mechanism")
        left = [f"{name} ({n})" for name, n in _left(exits, ours=False).items() if n]
        touched_note = (
            "Entries that differ from before, on a Llama of two layers: hooks, attributes, "
            "registry entries, frames on the stack as the first layer stores its keys, and so on. "
            f"Of the other mechanisms something is left by {', '.join(left) or 'none'}."
        )
        inside_note = (
            "What can be seen from inside: whether `inspect` says the same of an attention "
            "module's `forward` as without the mechanism, and how many frames a traceback shows "
            "between the decoder layer and an error, in the layer "
            f"({int(inside[_LAYER][BARE])} without any mechanism) and in the press."
        )
        return [
            _result(touched_note, _touched_table(changes, exits)),
            _result(inside_note, _inside_table(inside)),
            *_library_tables(tables["intrusiveness_libraries"]),
        ]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """What is touched and what is left, and of libraries as far as audited."""
        drawn = {"intrusiveness": _mechanisms_figure(tables)}
        libraries = tables["intrusiveness_libraries"]
        audited = libraries[libraries["error"].fillna("") == ""]
        if not audited.empty:
            drawn["intrusiveness_libraries"] = _libraries_figure(audited)
        return drawn

    def related(self, tables: Tables) -> list[Related]:
        left, own = tables["intrusiveness_libraries"], tables["intrusiveness_exits"]
        theirs = left[(left["library"] == "kvpress") & (left["when"] == LEFT)]
        # What an import loads is not what it changes.
        theirs = theirs[theirs["kind"] != "imported module"]
        by = theirs.groupby("subject")["changes"].sum()
        if by.empty:
            return []
        version, ours = theirs["version"].iloc[0], _left(own, ours=True).sum()
        behind = ", ".join(f"{subject} {count:.0f}" for subject, count in by.items())
        return [
            Related(
                "left",
                KVPRESS,
                "A press is a context manager: its hooks are there for the block.",
                f"Entries that kvpress {version} leaves behind, in the same audit: {behind}; "
                f"here {ours}.",
            )
        ]

    def contrasts(self, tables: Tables) -> list[Contrast]:
        exits = tables["intrusiveness_exits"]
        own = _left(exits, ours=True)
        bars = {name: float(own[own.index.str.startswith(name)].sum()) for name in OURS}
        worst = _left(exits, ours=False).nlargest(1)
        bars |= {str(name): float(count) for name, count in worst.items()}
        return [Contrast("Entries left behind", bars)]


EXPERIMENT = Intrusiveness()
