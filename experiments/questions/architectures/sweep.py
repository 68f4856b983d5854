"""The sweep over all decoders, each measured in a separate process."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import pandas as pd
import torch
import transformers

from experiments.framework.timing import threads
from experiments.framework.wording import in_one_line
from experiments.questions.architectures import cells
from experiments.questions.architectures.cells import OUTCOMES, Cell
from experiments.questions.architectures.decoders import DATA, Decoder, build, decoders

COLUMNS = ["type", "press", "mechanism", "attention", "cache", "padded", "outcome", "reason"]
BAD = OUTCOMES[2:6]
"""Outcomes that count as failures of a press."""

_BY_WEIGHT = ("not applicable", *OUTCOMES[:2], *reversed(OUTCOMES[2:6]))
SECONDS = 120
"""Time limit per decoder; its process is ended after this time."""

_REASONS: dict[str, str] = DATA["reasons"]
"""Short reasons by fragments of the error messages of refusals."""


def measure(
    types: Sequence[str],
    choose: Callable[[Cell], bool] = lambda cell: True,
    progress: Callable[[str], None] = lambda name: None,
) -> pd.DataFrame:
    """The outcome of every cell, one row each, with `COLUMNS`.

    As many decoders run in parallel as there are processors. A process that dies is the outcome
    "crash".

    Args:
        types: names of decoders.
        choose: whether to run a cell.
        progress: called with the name of each finished decoder.
    """
    known, chosen, rows = decoders(), list(filter(choose, cells.cells())), []
    with threads(1):  # forked processes do not inherit the threads of torch
        _warm_up(known["llama"])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = pool.map(partial(_rows_apart, chosen), [known[name] for name in types])
            for name, of_decoder in zip(types, found, strict=True):
                rows += of_decoder
                progress(name)
    return pd.DataFrame(rows, columns=COLUMNS)


def _warm_up(decoder: Decoder) -> None:
    """Import the modules that every model needs before processes are forked."""
    model: Any = build(decoder)
    model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, pad_token_id=0)


def _rows_apart(chosen: Sequence[Cell], decoder: Decoder) -> list[tuple[Any, ...]]:
    """The rows of one decoder, measured in a new process."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork, initializer=_limited) as process:
        try:
            return process.submit(rows_of, decoder, chosen).result()
        except BrokenProcessPool as error:
            return [_row(decoder, None, "crash", in_one_line(error))]


def _limited() -> None:
    """Set up a process: one thread, the time limit `SECONDS`, and no output."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")


def rows_of(decoder: Decoder, chosen: Iterable[Cell]) -> list[tuple[Any, ...]]:
    """The rows of one decoder, measured in this process."""
    try:
        bench = cells.Bench(build(decoder), decoder.image)
    except cells.NotApplicableError as error:
        return [_row(decoder, None, "not applicable", str(error))]
    except Exception as error:
        reason = f"cannot be built small: {in_one_line(error)}"
        return [_row(decoder, None, "not applicable", reason)]
    return [_row(decoder, cell, *bench.outcome(cell)) for cell in bench.distinct(chosen)]


def _row(decoder: Decoder, cell: Cell | None, outcome: str, reason: str) -> tuple[Any, ...]:
    return (decoder.name, *(cell or Cell("", "", "", "", padded=False)), outcome, reason)


def why(reason: str) -> str:
    """A short reason for the error message of a refusal; the message itself if none is known."""
    return next((short for part, short in _REASONS.items() if part in reason), reason)


def condensed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `measure` condensed to one per type and press.

    Returns:
        `type` and `press`; `hook` and `patch`, the worst outcome of each mechanism over all
        conditions; the number of `cells` that ran, and of `bad` ones; and a short `reason` of the
        worst outcome.
    """
    key = ["type", "press"]
    ordered = rows.sort_values("outcome", key=lambda o: o.map(_BY_WEIGHT.index), kind="stable")
    ordered["cells"] = ordered["outcome"] != "not applicable"
    ordered["bad"] = ordered["outcome"].isin(BAD)
    table = ordered.groupby(key).agg({"cells": "sum", "bad": "sum", "reason": "last"})
    table["reason"] = table["reason"].map(lambda reason: why(reason)[:160])
    worst = ordered.pivot_table("outcome", key, "mechanism", aggfunc="last")
    worst = worst.reindex(columns=["hook", "patch", ""]).bfill(axis=1).ffill(axis=1)
    in_order = pd.MultiIndex.from_frame(rows[key].drop_duplicates())
    return worst[["hook", "patch"]].join(table).loc[in_order].reset_index()
