"""Do hooks and patches leave the same bits? Presses x ratios x families x dtypes x attention.

Each cell of the grid is one comparison (`experiments.testbed.compare`): the cache after the prefill
and at the end, and the logits of every forward, are compared bit for bit.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.progress import Progress
from transformers import PreTrainedModel

import hooks_impl
from experiments import UserError
from experiments.framework import shared
from experiments.framework.experiment import Claim, Evidence, Experiment, Finding, Tables
from experiments.framework.frames import OutcomeMatrix, wide_table
from experiments.framework.options import DTYPES, Device, checked_share, one_of, several
from experiments.framework.own_model import OwnModel, Planned
from experiments.framework.plots import press_classes, press_label
from experiments.framework.tables import ResultTable
from experiments.framework.timing import threads
from experiments.framework.wording import sentences
from experiments.loading import has_attention, load_model, short_name
from experiments.testbed.compare import Inputs, PressPair, compare
from experiments.testbed.families import FAMILIES, small, supported_implementations
from experiments.testbed.recipes import DELIMITER, fitted_pair, press_name, recipe_pair
from press_core import PressError

EQUAL, REFUSED, DIFFERENT = "the same bits", "refused by both", "different bits"
LOOKS = {EQUAL: ("", "#c7e8dc"), REFUSED: ("\N{EN DASH}", "#eeeeee"), DIFFERENT: ("x", "#f4b6a0")}
"""Text and colour of a cell of the figure, by outcome."""

_finding = sentences(__file__)


@dataclass(frozen=True)
class Options:
    """Which cells to compare."""

    press: shared.Presses = ()
    model: shared.ModelOrOwn = None
    ratio: Annotated[
        tuple[float, ...], several(float, "Share of the tokens to evict, in [0, 1).", checked_share)
    ] = (0.5,)
    family: Annotated[
        tuple[str, ...],
        several(str, "Architecture of the small models, such as llama.", one_of(FAMILIES)),
    ] = ()
    dtype: Annotated[
        tuple[str, ...], several(str, "Data type of the model.", one_of((*DTYPES, "float64")))
    ] = ("float32", "bfloat16")
    attn: Annotated[
        tuple[str, ...], several(str, "Attention implementation, for families that support it.")
    ] = ("eager", "sdpa")
    length: shared.Tokens = 64
    device: Device = "cpu"


# ---- the grid ------------------------------------------------------------------------------------


def variants(options: Options) -> list[tuple[str, str, str]]:
    """The models to compare on: family or user's model, dtype, attention implementation.

    Implementations that the user's model does not support are left out, unless it has none.

    Raises:
        UserError: if both a family and a model are given, or no family supports an implementation.
    """
    if options.model is not None:
        if options.family:
            raise UserError("give either --model or --family, not both")
        attn = [each for each in options.attn if has_attention(options.model, each)]
        return list(product([options.model], options.dtype, attn or options.attn))
    families = options.family or FAMILIES
    grid = product(families, options.dtype, options.attn)
    found = [cell for cell in grid if cell[2] in supported_implementations(cell[0])]
    if not found:
        raise UserError(
            f"none of {', '.join(families)} has {' or '.join(options.attn)}; eager works for all "
            "families"
        )
    return found


def _load(options: Options, name: str, dtype: str, attn: str) -> PreTrainedModel:
    kind: Any = {"dtype": getattr(torch, dtype), "attn_implementation": attn}
    if options.model is None:
        return small(name, **kind).to(torch.device(options.device))
    return load_model(name, device=options.device, **kind)[0]


def run_grid(
    presses: Mapping[str, Callable[[float], PressPair]], options: Options, progress: Progress
) -> pd.DataFrame:
    """Compare both mechanisms in every cell of a grid.

    Args:
        presses: by name, functions that make a press with both mechanisms from a ratio.

    Returns:
        A row per `press`, `ratio`, `family` (or the name of the user's model) and `dtype`, over all
        attention implementations, with and without padding: the number of `cells`; how many were
        `compared`, which is all but the refused ones; how many `differ`; the `tokens` run with each
        mechanism, without padding; the first `difference` and its cell; and the `refusal`, the
        error that both mechanisms raise. The last two are empty if there is none.
    """
    rows, key = [], ["press", "ratio", "family", "dtype"]
    for name, dtype, attn in progress.track(variants(options), description="equivalence"):
        model = _load(options, name, dtype, attn)
        for (press, make), ratio, padded in product(presses.items(), options.ratio, (False, True)):
            cell = f"{attn}, {'' if padded else 'not '}padded"
            inputs = _inputs(model, options.length, padded, press)
            found = _compare(model, make(ratio), inputs, cell)
            rows.append((press, ratio, short_name(name), dtype, *found))
    table = pd.DataFrame(rows, columns=[*key, "tokens", "difference", "refusal"])
    table = table.assign(compared=table["refusal"] == "", differ=table["difference"] != "")
    counted = table.groupby(key, sort=False).agg(
        cells=("tokens", "size"),
        **{name: (name, "sum") for name in ("compared", "differ", "tokens")},
        **{name: (name, lambda t: next(filter(None, t), "")) for name in ("difference", "refusal")},
    )
    return counted.reset_index()


def _inputs(model: PreTrainedModel, length: int, padded: bool, press: str) -> Inputs:
    lengths = (length, max(1, length * 2 // 3)) if padded else (length, length)
    inputs = Inputs.random(model.config.get_text_config().vocab_size, lengths, steps=1)
    return inputs.with_delimiter(DELIMITER, question=6) if press == "FinchPress" else inputs


def _compare(
    model: PreTrainedModel, presses: PressPair, inputs: Inputs, cell: str
) -> tuple[int, str, str]:
    """Number of tokens, difference and refusal of one cell, as in `run_grid`."""
    try:
        difference = compare(model, *fitted_pair(presses, model), inputs)
    except PressError as refusal:
        return 0, "", str(refusal)
    return inputs.n_tokens, f"{cell}: {difference}" if difference else "", ""


# ---- the experiment ------------------------------------------------------------------------------


class Equivalence(Experiment[Options]):
    """Run presses with hooks and with patches, and compare caches and logits bit for bit. The
    input is random tokens. If anything differs, the first layer, head and position with a
    difference are printed, and the exit status is 1.

    Does a press leave the same cache and the same logits whether hooks or patches install it?

    Each press runs twice, once with hooks and once with patches, on the same small model with
    random weights and on the same random tokens. The cache (kept positions, keys, values,
    lengths) is compared bit for bit after the prefill and at the end, and so are the logits of
    the prefill, of a follow-up question of several tokens and of one decode step. A combination
    counts as different if a single bit differs. Small random models run the same code as
    trained ones, but with other numbers, so equality here does not prove equality on a large
    checkpoint; `--model` repeats the comparison on any model.
    """

    name = "equivalence"
    title = "Do both mechanisms leave the same bits?"
    evidence = Evidence.BITS
    full = Options()
    quick = Options(family=("llama", "gemma3_text", "gpt_neox"), dtype=("bfloat16",))
    claims: ClassVar = {"bits": Claim(replace(quick, family=("llama",), attn=("sdpa",)))}

    def on(self, own: OwnModel) -> Planned[Options]:
        (length,) = own.at_most(Options.length)
        grid = {"family": (), "dtype": (own.dtype,), "attn": (own.attn,), "length": length}
        options = self.quick_on(own, **grid)
        n_runs = 2 * 2 * len(hooks_impl.PRESSES)  # two mechanisms, with and without padding
        return Planned(options, n_runs * 2 * length, steps=n_runs * 2, seconds=0.02 * n_runs)

    def measure(self, options: Options, progress: Progress) -> Tables:
        names = [press_name(name) for name in options.press] or sorted(hooks_impl.PRESSES)
        # On the small models of the families, more threads are slower.
        with threads(1) if options.model is None else nullcontext():
            makers = {press_classes(name): partial(recipe_pair, name) for name in names}
            return {"equivalence": run_grid(makers, options, progress)}

    def findings(self, tables: Tables) -> list[Finding]:
        cells = tables["equivalence"]
        compared, differ = cells[["compared", "differ"]].sum()
        if not compared:
            return [_finding("bits", as_in="refused", n=cells["cells"].sum())]
        return [_finding("bits", "breaks" if differ else "works", differ=differ, compared=compared)]

    def views(self, tables: Tables) -> list[ResultTable]:
        """Equal combinations by press, presses that both mechanisms refuse, first differences."""
        cells = tables["equivalence"]
        both = pd.concat([cells, cells.assign(dtype="all")])
        sums = both.groupby(["press", "dtype"], sort=False)[["compared", "differ"]].sum()
        shown = [f"{n - differ}/{n}" if n else "refused" for n, differ in sums.to_numpy()]
        n_refused = int((cells["cells"] - cells["compared"]).sum())
        note = (
            f"Combinations with equal bits, of those compared (both refuse {n_refused} more), over "
            f"{int(cells['tokens'].sum()):,} tokens with each mechanism."
        )
        refused = cells[cells["compared"] == 0].drop_duplicates(["press", "family"])
        notes = [
            f"- Both refuse {cell.press} on {cell.family}: {cell.refusal}"
            for cell in refused.itertuples()
        ]
        for cell in cells[cells["differ"] > 0].head(5).itertuples():
            place = f"{cell.press} at ratio {cell.ratio} on {cell.family}, {cell.dtype}"
            notes.append(f"- {place}, {cell.difference} ({cell.differ} of {cell.compared} cells)")
        table = wide_table(note, sums.reset_index(), ["press"], "dtype", shown)
        return [table, *([ResultTable("\n".join(notes))] if notes else [])]

    def figures(self, tables: Tables) -> dict[str, Figure]:
        """A square per press and model, with the worst outcome of its cells."""
        cells = tables["equivalence"]
        cases = [cells["differ"] > 0, cells["compared"] > 0]
        outcome = np.select(cases, [DIFFERENT, EQUAL], REFUSED)
        press = cells["press"].map(press_label)
        rows = cells.assign(outcome=outcome, mechanism=cells["family"], press=press)
        label = "Each press (rows) on each model: whether hooks and patches leave the same bits"
        return {"equivalence": OutcomeMatrix(rows, "press", LOOKS).figure(label)}

    def passed(self, tables: Tables) -> bool:
        cells = tables["equivalence"]
        return bool(cells["compared"].any() and not cells["differ"].any())


EXPERIMENT = Equivalence()
