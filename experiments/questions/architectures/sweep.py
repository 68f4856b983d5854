"""The sweep: every decoder in a process of its own, its rows kept as soon as they are there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

from experiments.framework.timing import threads
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
    store: Path | None = None,
    choose: Callable[[Cell], bool] = lambda cell: True,
    progress: Callable[[str], None] = lambda name: None,
) -> pd.DataFrame:
    """The outcome of every cell, one row each: the `COLUMNS`.

    Args:
        types: names of decoders; None: all.
        store: a CSV file that rows are appended to as they come; types that it has are not run.
        choose: which cells to run.
        progress: told the name of each decoder that is done.
    """
    known = decoders()
    done = pd.read_csv(store, keep_default_na=False) if store and store.exists() else _table([])
    tables = [done]
    waiting = [known[name] for name in types or known if name not in set(done["type"])]
    with threads(1):  # in each of the processes
        _warm_up(known["llama"])
        for decoder, rows in _in_processes(waiting, choose):
            progress(decoder.name)
            tables.append(_table(rows))
            if store:
                tables[-1].to_csv(store, mode="a", header=not store.exists(), index=False)
    return pd.concat(tables, ignore_index=True)


def _table(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=COLUMNS)


def _warm_up(decoder: Decoder) -> None:
    """Import what every model needs, once for all processes to come."""
    model: Any = build(decoder)
    model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, pad_token_id=0)


def _in_processes(
    waiting: list[Decoder], choose: Callable[[Cell], bool]
) -> Iterator[tuple[Decoder, list[tuple[Any, ...]]]]:
    """Decoders and their rows, in order; as many run at a time as there are processors."""
    at_once = os.cpu_count() or 1
    running: deque[_Running] = deque()
    try:
        for decoder in waiting:
            running.append(_Running(decoder, choose))
            if len(running) == at_once:
                yield running[0].decoder, running[0].rows()
                running.popleft()
        while running:
            yield running[0].decoder, running[0].rows()
            running.popleft()
    finally:
        for started in running:
            started.process.kill()


class _Running:
    """A decoder in a process of its own."""

    def __init__(self, decoder: Decoder, choose: Callable[[Cell], bool]) -> None:
        self.decoder = decoder
        self.receiver, sender = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("fork").Process(
            target=_send_rows, args=(decoder, choose, sender)
        )
        self.process.start()
        sender.close()

    def rows(self) -> list[tuple[Any, ...]]:
        """What it sends once it is done; a crash of the process is an outcome like others."""
        try:
            rows: list[tuple[Any, ...]] = self.receiver.recv()
        except EOFError:
            self.process.join()
            reason = f"its process ended with {self.process.exitcode}"
            rows = [_row(self.decoder, None, "crash", reason)]
        self.process.join()
        return rows


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
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return [_row(decoder, None, "not applicable", f"cannot be built small: {told}")]
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
