"""Do hooks and patches leave the same bits? Presses x ratios x families x dtypes x attention.

Each cell of the grid is one comparison (`experiments.testbed.compare`): the cache after the prefill
and at the end, and the logits of every forward, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import Annotated, Any, ClassVar, NamedTuple

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import PreTrainedModel

import hooks_impl
from experiments import UserError
from experiments.framework.evidence import Evidence
from experiments.framework.experiment import Claim, Experiment, Finding, Related, Tables
from experiments.framework.heatmap import draw_cells
from experiments.framework.options import DTYPES, Device, checked_share, one_of
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import new_figure, press_label, style
from experiments.framework.tables import ResultTable
from experiments.framework.timing import threads
from experiments.framework.works import KVPRESS, SNAPKV
from experiments.loading import ModelNotFoundError, load_model, short_name
from experiments.testbed.compare import Inputs, PressPair, compare
from experiments.testbed.families import FAMILIES, HYBRID, build, supported_implementations
from experiments.testbed.recipes import DELIMITER, fitted_pair, recipe_pair
from press_core import PressError
from press_core.scope import InstalledPress

PressMaker = Callable[[float], PressPair]
"""From a compression ratio to a press with both mechanisms."""

IMPLEMENTATIONS = ("eager", "sdpa")


@dataclass(frozen=True)
class Options:
    """Which cells to compare."""

    press: Annotated[
        tuple[str, ...],
        typer.Option(
            help="A press to compare, such as SnapKVPress; or two presses of your own, the one "
            "made of hooks first: my_module:MyHookPress,my_module:MyPatchPress. Repeatable.",
            show_default="all presses",
        ),
    ] = ()
    model: Annotated[
        str | None,
        typer.Option(
            help="A model to compare on: a shipped one, a folder, or a hub id.",
            show_default="a small random model of each family",
        ),
    ] = None
    ratio: Annotated[
        tuple[float, ...],
        typer.Option(
            help="Share of the tokens to evict, in [0, 1). Repeatable.", callback=checked_share
        ),
    ] = (0.5,)
    family: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Architecture of the small models, such as llama. Repeatable.",
            show_default="all families",
            callback=one_of(FAMILIES),
        ),
    ] = ()
    dtype: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Data type of the model, such as bfloat16. Repeatable.",
            callback=one_of((*DTYPES, "float64")),
        ),
    ] = ("float32", "bfloat16")
    attn: Annotated[
        tuple[str, ...],
        typer.Option(
            help="Attention implementation, such as eager, where a family has it. Repeatable."
        ),
    ] = IMPLEMENTATIONS
    length: Annotated[int, typer.Option(min=2, help="Tokens of the context.")] = 64
    device: Device = "cpu"


# ---- the grid ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """Something to run presses on: a family's small model, or a model of the user's own.

    Attributes:
        name: what the table calls it.
        implementations: the attention implementations that it is run with.
        load: from dtype and attention implementation to the model.
    """

    name: str
    implementations: tuple[str, ...]
    load: Callable[[torch.dtype, str], PreTrainedModel]


def family_subject(
    family: str, implementations: Sequence[str] = IMPLEMENTATIONS, device: str = "cpu"
) -> Subject:
    """A small random model of `family`, with those of the implementations that the family has."""
    offered = supported_implementations(family)
    # Two layers each; hybrid families add a sliding one to every layer that is asked for.
    num_layers = 1 if family in HYBRID else 2

    def load(dtype: torch.dtype, implementation: str) -> PreTrainedModel:
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": implementation}
        model = build(family, num_layers=num_layers, **options)
        return model.to(torch.device(device))

    return Subject(family, tuple(i for i in implementations if i in offered), load)


def registered(name: str) -> PressMaker:
    """The press registered as `name`, with windows that fit into the contexts used here."""
    return lambda ratio: recipe_pair(name, ratio)


class Cell(NamedTuple):
    """One row of the table.

    Attributes:
        family: of the small model, or name of the user's own.
        padded: whether the batch had rows of different lengths.
        tokens: tokens run with each mechanism, padding not counted; 0 where both refuse.
        equal: whether no bit differed.
        difference: the first difference, empty where there is none.
        refusal: why both mechanisms refuse alike, empty where they don't.
    """

    press: str
    ratio: float
    family: str
    dtype: str
    attn_implementation: str
    padded: bool
    tokens: int
    equal: bool
    difference: str
    refusal: str


def run_grid(
    presses: Mapping[str, PressMaker],
    ratios: Sequence[float],
    subjects: Sequence[Subject],
    dtypes: Sequence[str],
    length: int,
    progress: Progress,
) -> pd.DataFrame:
    """Compare both mechanisms in every cell of a grid.

    Args:
        presses: makers by name.
        ratios: each in [0, 1).
        dtypes: names of floating-point dtypes of torch.
        length: tokens of a context.

    Returns:
        One row per cell, with the columns of `Cell`.
    """
    models = [
        (subject, dtype, implementation)
        for subject in subjects
        for dtype, implementation in product(dtypes, subject.implementations)
    ]
    combinations = list(product(presses.items(), ratios, (False, True)))
    cells = []
    task = progress.add_task("", total=len(models) * len(combinations))
    for subject, dtype, implementation in models:
        progress.update(task, description=f"{subject.name} {dtype} {implementation}")
        model = subject.load(getattr(torch, dtype), implementation)
        for (name, make), ratio, padded in combinations:
            result = _compare(model, make(ratio), _inputs(model, length, padded, name))
            place = (name, ratio, subject.name, dtype, implementation, padded)
            cells.append(Cell(*place, *result))
            progress.advance(task)
    return pd.DataFrame(cells, columns=list(Cell._fields))


def _inputs(model: PreTrainedModel, length: int, padded: bool, press: str) -> Inputs:
    lengths = (length, max(1, length * 2 // 3)) if padded else (length, length)
    inputs = Inputs.random(model.config.get_text_config().vocab_size, lengths, steps=1)
    return inputs.with_delimiter(DELIMITER, question=6) if press == "FinchPress" else inputs


def _compare(
    model: PreTrainedModel, presses: PressPair, inputs: Inputs
) -> tuple[int, bool, str, str]:
    """The last four fields of a `Cell`."""
    try:
        both = fitted_pair(presses, model)
        difference = compare(model, both.hook, both.patch, inputs)
    except PressError as refusal:
        return 0, True, "", str(refusal)
    return inputs.n_tokens, difference is None, str(difference or ""), ""


def counted(cells: pd.DataFrame) -> pd.DataFrame:
    """Cells of a grid in one row per press, ratio, model and dtype.

    Returns:
        Those four; `cells`, how many there are; `compared`, those that were not refused; `differ`,
        those with a difference; `tokens`, run with each mechanism; the first `difference`, with the
        cell it was found in, and the `refusal`, empty where there is none.
    """
    place = ["press", "ratio", "family", "dtype"]
    rows = []
    for key, group in cells.groupby(place, sort=False):
        different = group[~group["equal"]]
        rows.append(
            {
                **dict(zip(place, key, strict=True)),
                "cells": len(group),
                "compared": int((group["tokens"] > 0).sum()),
                "differ": len(different),
                "tokens": int(group["tokens"].sum()),
                "difference": next(map(_first_difference, different.itertuples()), ""),
                "refusal": next(filter(None, group["refusal"]), ""),
            }
        )
    return pd.DataFrame(rows)


def _first_difference(cell: Any) -> str:
    batch = "padded" if cell.padded else "not padded"
    return f"{cell.attn_implementation}, {batch}: {cell.difference}"


# ---- what was asked for --------------------------------------------------------------------------


def _subjects(options: Options) -> list[Subject]:
    if options.model is not None:
        if options.family:
            raise UserError("give either --model or --family, not both")
        return [_loaded_subject(options.model, options.attn, options.device)]
    names = options.family or FAMILIES
    subjects = [family_subject(name, options.attn, options.device) for name in names]
    if not any(subject.implementations for subject in subjects):
        raise UserError(
            f"none of {', '.join(names)} has {' or '.join(options.attn)}; eager works for all "
            "families"
        )
    return subjects


def _loaded_subject(name: str, implementations: tuple[str, ...], device: str) -> Subject:
    def load(dtype: torch.dtype, implementation: str) -> PreTrainedModel:
        try:
            options: dict[str, Any] = {"attn_implementation": implementation, "device": device}
            return load_model(name, dtype=dtype, **options)[0]
        except ModelNotFoundError:
            raise
        except (ImportError, ValueError) as error:  # an implementation that is not there
            reason = str(error).splitlines()[0]
            raise UserError(f"cannot load {name} with {implementation}: {reason}") from error

    return Subject(short_name(name), implementations, load)


def _press_option(text: str) -> tuple[str, PressMaker]:
    """A value of `--press` as a name for the table and a maker."""
    if ":" not in text:
        if text not in hooks_impl.PRESSES:
            known = ", ".join(sorted(hooks_impl.PRESSES))
            raise UserError(f"press {text!r} is unknown; choose from {known}")
        return text, registered(text)
    parts = text.split(",")
    if len(parts) != 2:
        raise UserError(
            f"{text!r} names {_number(len(parts), 'press', 'presses')}; give two, as in "
            "my_module:MyHookPress,my_module:MyPatchPress"
        )
    hook, patch = map(_press_class, parts)
    names = dict.fromkeys((hook.__name__, patch.__name__))

    def make(ratio: float) -> PressPair:
        return PressPair(hook(compression_ratio=ratio), patch(compression_ratio=ratio))

    return " / ".join(names), make


def _press_class(text: str) -> type[Any]:
    """The class named `module:Class`, which has to be a press with a `compression_ratio`."""
    module, _, name = text.strip().partition(":")
    try:
        found: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"cannot import {text.strip()!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, InstalledPress)):
        raise UserError(
            f"{text.strip()!r} is no press; derive it from hooks_impl.BasePress or "
            "patch_impl.BasePress"
        )
    if "compression_ratio" not in getattr(found, "__dataclass_fields__", {}):
        raise UserError(
            f"{text.strip()!r} takes no compression_ratio; derive it from ScorerPress, or give it "
            "that field"
        )
    return found


# ---- reading the table ---------------------------------------------------------------------------


_Counts = dict[Any, tuple[int, int]]
"""Cells that are equal and cells compared, per group; a group that is refused is not in it."""


def _counts(cells: pd.DataFrame, by: str | list[str]) -> _Counts:
    sums = cells[cells["compared"] > 0].groupby(by, sort=False)[["compared", "differ"]].sum()
    equal = sums["compared"] - sums["differ"]
    return dict(zip(sums.index, zip(equal, sums["compared"], strict=True), strict=True))


_GREY, _RED, _GREEN = "#eeeeee", "#f4b6a0", "#c7e8dc"


def _figure(cells: pd.DataFrame) -> Figure:
    """A square per press and model; with words in it where there is more to say than "equal"."""
    presses, families = list(cells["press"].unique()), list(cells["family"].unique())
    counts = _counts(cells, ["press", "family"])
    looks = {
        (press_label(press), family): _look(counts, (press, family))
        for press, family in product(presses, families)
    }
    width, height = 1.6 + 0.27 * len(families), 1.2 + 0.18 * len(presses)
    figure, (panel,) = new_figure(width=max(width, 3.6), height=height)
    with style():
        draw_cells(panel, [press_label(press) for press in presses], families, looks)
    figure.set_label(
        "Green: hook and patch leave the same bits in every cell of a press and a model; red: they "
        "differ in as many; grey, with a dash: both refuse"
    )
    return figure


def _look(counts: _Counts, group: Any) -> tuple[str, str]:
    """How many cells differ, or a dash where both refuse; and the colour of that."""
    if group not in counts:
        return "\N{EN DASH}", _GREY
    equal, compared = counts[group]
    return ("", _GREEN) if equal == compared else (str(compared - equal), _RED)


def _label(counts: _Counts, group: Any) -> str:
    return "{}/{}".format(*counts[group]) if group in counts else "refused"


def _grid(cells: pd.DataFrame) -> str:
    return (
        f"{_number(cells['press'].nunique(), 'press', 'presses')}; "
        f"{'ratio' if cells['ratio'].nunique() == 1 else 'ratios'} "
        f"{_listed(cells['ratio'])}; {_number(cells['family'].nunique(), 'model', 'models')}; "
        f"{_listed(cells['dtype'])}; every attention implementation asked for that a model has; "
        "rows of equal length, and padded ones"
    )


def _number(n: int, one: str, several: str) -> str:
    return f"{n} {one if n == 1 else several}"


def _listed(column: pd.Series[Any]) -> str:
    return ", ".join(str(value) for value in column.unique())


def _refusals(cells: pd.DataFrame) -> Iterator[str]:
    refused = cells[cells["compared"] == 0]
    for (press, family), group in refused.groupby(["press", "family"], sort=False):
        yield f"Both refuse {press} on {family}: {group['refusal'].iloc[0]}"


def _differences(cells: pd.DataFrame, limit: int) -> Iterator[str]:
    unequal = cells[cells["differ"] > 0]
    for cell in unequal.head(limit).itertuples():
        place = f"{cell.press} at ratio {cell.ratio} on {cell.family}, {cell.dtype}"
        yield f"{place}, {cell.difference} ({cell.differ} of {cell.compared} cells differ)"
    if len(unequal) > limit:
        yield f"and {len(unequal) - limit} more"


class Equivalence(Experiment[Options]):
    """Run presses as hooks and as patches, and compare caches and logits bit for bit.

    Input is random tokens. The exit status is 1 if anything differs; the first layer, head and
    position that does is named.
    """

    name = "equivalence"
    title = "Do both mechanisms leave the same bits?"
    question = (
        "Does a press leave the same cache and the same logits whether hooks install it or patches?"
    )
    method = (
        "Each press runs twice on the same small random model and the same random tokens: once "
        "with hooks, once with patches. The cache (positions, keys, values, lengths) is compared "
        "after the prefill and at the end, and so are the logits of the prefill, of a question of "
        "several tokens and of a decode step. One bit that differs makes a cell differ. Small "
        "random models have the code paths of large ones, but not their numbers; `--model` runs "
        "the same on any model."
    )
    evidence = Evidence.BITS
    full = Options()
    quick = Options(family=("llama", "gemma3_text", "gpt_neox"), dtype=("bfloat16",))
    claims: ClassVar = {
        "bits": Claim(replace(quick, family=("llama",), attn=("sdpa",))),
    }

    def on(self, own: OwnModel) -> Planned[Options]:
        (length,) = own.at_most(Options.length)
        told = {"family": (), "dtype": (own.dtype,), "attn": ("sdpa",), "length": length}
        options = self.quick_on(own, **told)
        n_runs = 2 * 2 * len(hooks_impl.PRESSES)  # with each mechanism, padded and not
        return Planned(options, n_runs * 2 * length, steps=n_runs * 2, seconds=0.02 * n_runs)

    def measure(self, options: Options, progress: Progress) -> Tables:
        makers = dict(map(_press_option, options.press or sorted(hooks_impl.PRESSES)))
        grid = (makers, options.ratio, _subjects(options), options.dtype, options.length)
        # More threads only get in the way of models as small as those of the families.
        with threads(1) if options.model is None else nullcontext():
            return {"equivalence": counted(run_grid(*grid, progress))}

    def findings(self, tables: Tables) -> list[Finding]:
        cells = tables["equivalence"]
        compared, differ = int(cells["compared"].sum()), int(cells["differ"].sum())
        if not compared:
            n_cells = cells["cells"].sum()
            text = f"Nothing was compared: both mechanisms refuse all **{n_cells}** cells."
            return [Finding("bits", text)]
        text = (
            f"Hooks and patches leave different bits in **{differ:,}** of {compared:,} "
            "combinations of press, model, precision, attention and padding."
        )
        need = "get the same cache from either mechanism"
        return [Finding("bits", text, need, "breaks" if differ else "works")]

    def views(self, tables: Tables) -> list[ResultTable]:
        cells = tables["equivalence"]
        dtypes = [str(dtype) for dtype in cells["dtype"].unique()]
        by_dtype, by_press = _counts(cells, ["press", "dtype"]), _counts(cells, "press")
        rows = []
        for press in cells["press"].unique():
            counted = [_label(by_dtype, (press, dtype)) for dtype in dtypes]
            rows.append([press, *counted, _label(by_press, press)])
        tokens = int(cells["tokens"].sum())
        note = (
            f"Cells whose bits are equal, of those compared: {tokens:,} tokens with each "
            f"mechanism. The grid: {_grid(cells)}."
        )
        return [ResultTable(note, ["press", *dtypes, "all"], rows)]

    def remarks(self, tables: Tables) -> list[str]:
        cells = tables["equivalence"]
        notes = [f"- {text}" for text in (*_refusals(cells), *_differences(cells, limit=5))]
        return ["\n".join(notes)] if notes else []

    def figures(self, tables: Tables) -> dict[str, Figure]:
        return {"equivalence": _figure(tables["equivalence"])}

    def related(self, tables: Tables) -> list[Related]:
        cells = tables["equivalence"]
        compared, differ = int(cells["compared"].sum()), int(cells["differ"].sum())
        equal = f"{compared - differ:,} of {compared:,} combinations"
        return [
            Related(
                "bits",
                KVPRESS,
                "Presses are forward hooks; those that read queries project them once more.",
                "Hooks collect the queries that the model has projected itself, which is what "
                f"makes bits comparable: {equal} are equal to those of patches.",
            ),
            Related(
                "bits",
                SNAPKV,
                "Its code replaces the attention forwards of particular transformers releases.",
                "One patch serves every architecture of the grid, and the method does not need it: "
                f"a hook leaves the same bits in {equal}.",
            ),
        ]

    def passed(self, tables: Tables) -> bool:
        cells = tables["equivalence"]
        return bool(cells["compared"].any() and not cells["differ"].any())


EXPERIMENT = Equivalence()
