"""The sweep: every decoder in a process of its own, its rows kept as soon as they are there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
import transformers

from experiments.framework.timing import threads
from experiments.framework.wording import in_one_line
from experiments.questions.architectures.cells import (
    OUTCOMES,
    Bench,
    Cell,
    NotApplicableError,
    cells,
)
from experiments.questions.architectures.decoders import Decoder, build, decoders
from experiments.questions.architectures.reach import why

COLUMNS = ["type", "press", "mechanism", "attention", "cache", "padded", "outcome", "reason"]
BAD = OUTCOMES[2:6]
"""Outcomes that neither mechanism may have."""

_BY_WEIGHT = ("not applicable", *OUTCOMES[:2], *reversed(OUTCOMES[2:6]))
SECONDS = 120
"""A model that takes longer than this is given up."""


def measure(
    types: Iterable[str] | None = None,
    choose: Callable[[Cell], bool] = lambda cell: True,
    progress: Callable[[str], None] = lambda name: None,
) -> pd.DataFrame:
    """The outcome of every cell, one row each: the `COLUMNS`.

    As many decoders run at a time as there are processors; a process that dies is an outcome too.

    Args:
        types: names of decoders; None: all.
        choose: which cells to run.
        progress: told the name of each decoder that is done.
    """
    known, rows = decoders(), []
    waiting = deque(known[name] for name in types or known)
    running: deque[tuple[Decoder, Any, Any]] = deque()
    with threads(1):  # in each of the processes
        _warm_up(known["llama"])
        try:
            while waiting or running:
                while waiting and len(running) < (os.cpu_count() or 1):
                    running.append(_started(waiting.popleft(), choose))
                decoder, process, receiver = running[0]
                try:
                    rows += receiver.recv()
                except EOFError:
                    process.join()
                    reason = f"its process ended with {process.exitcode}"
                    rows.append(_row(decoder, None, "crash", reason))
                running.popleft()
                process.join()
                progress(decoder.name)
        finally:
            for _, process, _ in running:
                process.kill()
    return pd.DataFrame(rows, columns=COLUMNS)


def _warm_up(decoder: Decoder) -> None:
    """Import what every model needs, once for all processes to come."""
    model: Any = build(decoder)
    model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, pad_token_id=0)


def _started(decoder: Decoder, choose: Callable[[Cell], bool]) -> tuple[Decoder, Any, Any]:
    """A decoder, the process that measures it, and where its rows will come from."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_send_rows, args=(decoder, choose, sender)
    )
    process.start()
    sender.close()
    return decoder, process, receiver


def _send_rows(decoder: Decoder, choose: Callable[[Cell], bool], sender: Any) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        sender.send(rows_of(decoder, choose))


def rows_of(
    decoder: Decoder, choose: Callable[[Cell], bool] = lambda cell: True
) -> list[tuple[Any, ...]]:
    """The rows of one decoder, measured in this process."""
    try:
        bench = Bench(build(decoder), decoder.image)
    except NotApplicableError as reason:
        return [_row(decoder, None, "not applicable", str(reason))]
    except Exception as error:
        told = f"cannot be built small: {in_one_line(error)}"
        return [_row(decoder, None, "not applicable", told)]
    return [_row(decoder, cell, *bench.outcome(cell)) for cell in cells() if choose(cell)]


def _row(decoder: Decoder, cell: Cell | None, outcome: str, reason: str) -> tuple[Any, ...]:
    where = (cell.press, cell.mechanism, cell.attention, cell.cache, cell.padded) if cell else ()
    return (decoder.name, *(where or ("", "", "", "", False)), outcome, reason)


def condensed(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in one per type and press.

    Returns:
        `type` and `press`; `hook` and `patch`, the worst outcome of each over all conditions;
        `cells` that ran, and how many of them are `bad`; and the `reason` of the worst outcome,
        in short.
    """
    rank = {outcome: n for n, outcome in enumerate(_BY_WEIGHT)}
    found = []
    for (kind, press), group in rows.groupby(["type", "press"], sort=False):
        ordered = group.sort_values("outcome", key=lambda column: column.map(rank), kind="stable")
        worst = ordered.groupby("mechanism")["outcome"].last()
        found.append(
            {
                "type": kind,
                "press": press,
                "hook": worst.get("hook", worst.iloc[0]),
                "patch": worst.get("patch", worst.iloc[0]),
                "cells": int((group["outcome"] != "not applicable").sum()),
                "bad": int(group["outcome"].isin(BAD).sum()),
                "reason": why(ordered["reason"].iloc[-1])[:160],
            }
        )
    columns = ["type", "press", "hook", "patch", "cells", "bad", "reason"]
    return pd.DataFrame(found, columns=columns)
