"""The most memory that an answer takes, beyond the model itself.

On a GPU that is what torch's allocator says. On a CPU it is the resident size of a process. So that
no answer finds what an earlier one left, each has a process of its own; and so that a token more
never takes less, the C library is told to give back at once what is freed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from experiments.framework.wording import in_one_line
from experiments.questions.throughput.cells import (
    Condition,
    Opens,
    Subject,
    answer,
    context_of,
    scope_of,
)
from press_core import UnsupportedModelError


class Run(NamedTuple):
    """One answer whose memory is measured."""

    condition: Condition
    context: int
    batch: int
    tokens: int


def peak_of(subject: Subject, run: Run) -> int | None:
    """Bytes that a run takes at most, beyond those that the loaded model takes.

    Returns:
        None if the process ended before it was done, as one does that asks for too much.

    Raises:
        RuntimeError: if the run failed.
    """
    if torch.device(subject.device).type == "cuda":
        return _on_gpu(subject, run)
    spawn = _processes()
    mine, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_in_child, args=(theirs, subject, run, torch.get_num_threads()))
    child.start()
    theirs.close()
    try:
        outcome = mine.recv()
    except EOFError:
        return None
    finally:
        child.join()
        mine.close()
    if isinstance(outcome, str):
        raise RuntimeError(f"{run.condition} at {run.context} tokens: {outcome}")
    return int(outcome)


@cache
def _processes() -> Any:
    """Processes that begin with torch and transformers loaded, and nothing run, where they can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _in_child(result: Connection, subject: Subject, run: Run, threads: int) -> None:
    try:
        torch.set_num_threads(threads)
        _give_back_at_once()
        result.send(_growth(subject.load(), run))
    except MemoryError:
        raise
    except Exception as error:
        result.send(in_one_line(error))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _give_back_at_once() -> None:
    """Let glibc return memory to the system as it is freed; other C libraries stay as they are."""
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(parameter, 2**16)


def _growth(model: PreTrainedModel, run: Run) -> int:
    opens = scope_of(run.condition, model, run.context)
    ids = context_of(model, run.batch, run.context)
    _answer(model, run._replace(context=16, batch=1), None)  # threads and their buffers
    before = resident()
    reset_peak()
    _answer(model, run, opens, ids)
    return max(0, peak_resident() - before)


def _answer(
    model: PreTrainedModel, run: Run, opens: Opens | None, ids: torch.Tensor | None = None
) -> None:
    bare = scope_of(Condition(), model, run.context)
    ids = context_of(model, run.batch, run.context) if ids is None else ids
    answer(model, ids, opens or bare, run.tokens)


@cache
def _loaded(subject: Subject) -> PreTrainedModel:
    return subject.load()


def _on_gpu(subject: Subject, run: Run) -> int | None:
    model = _loaded(subject)
    opens = scope_of(run.condition, model, run.context)
    ids = context_of(model, run.batch, run.context)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    try:
        answer(model, ids, opens, run.tokens)
    except torch.cuda.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated(model.device) - before


# ---- of this process -----------------------------------------------------------------------------

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int:
    """Resident bytes of this process; where the system tells only their peak, that."""
    return _kib("VmRSS") if _STATUS.exists() else peak_resident()


def peak_resident() -> int:
    """The most resident bytes of this process, since `reset_peak` where that can be."""
    if _STATUS.exists():
        return _kib("VmHWM")
    try:
        import resource
    except ImportError:
        raise UnsupportedModelError(
            "this system does not tell how much memory a process takes; run with --no-memory"
        ) from None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def reset_peak() -> None:
    """Let the peak begin at what is resident now, where the system can."""
    with suppress(OSError):
        _CLEAR.write_text("5")


def _kib(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
