"""The most memory that an answer takes beyond the model itself, and what fits within a limit.

On a GPU that is what torch's allocator says. On a CPU it is the resident size of a process. So that
no answer finds what an earlier one left, each has a process of its own; and so that a token more
never takes less, the C library is told to give back at once what is freed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from experiments.questions.throughput.speed import answer
from experiments.testbed.timed_models import FULL, Condition, ModelSpec, random_context, scope_of
from press_core import UnsupportedModelError, attention_sites


def peak_of(
    spec: ModelSpec, condition: Condition, context: int, batch: int, tokens: int
) -> int | None:
    """Bytes that an answer takes at most, beyond those that the loaded model takes.

    Returns:
        None if there was not enough memory; a process that asks for too much may be ended.
    """
    asked = spec, condition, context, batch, tokens, torch.get_num_threads()
    try:
        with ProcessPoolExecutor(1, _processes()) as process:
            return process.submit(_in_process, *asked).result()
    except (BrokenProcessPool, MemoryError, torch.OutOfMemoryError):
        return None


@cache
def _processes() -> Any:
    """Processes that begin with torch and transformers loaded, and nothing run, where they can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _in_process(
    spec: ModelSpec, condition: Condition, context: int, batch: int, tokens: int, threads: int
) -> int:
    torch.set_num_threads(threads)
    with suppress(AttributeError, OSError, TypeError):  # other C libraries than glibc
        libc = ctypes.CDLL(None)
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(parameter, 2**16)
    model = spec.load()
    opens, ids = scope_of(condition, model, context), random_context(model, batch, context)
    answer(model, ids[:1, :16], scope_of(FULL, model, 16), tokens)  # threads and their buffers
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        answer(model, ids, opens, tokens)
        return torch.cuda.max_memory_allocated() - before
    with suppress(OSError):  # else the peak includes that of loading
        Path("/proc/self/clear_refs").write_text("5")
    before = _most_resident()
    answer(model, ids, opens, tokens)
    return _most_resident() - before


def _most_resident() -> int:
    """Resident bytes of this process, at most."""
    try:
        import resource
    except ImportError:
        raise UnsupportedModelError(
            "this system does not tell how much memory a process takes; run with --no-memory"
        ) from None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def cache_bytes(model: PreTrainedModel, tokens: int, condition: Condition) -> float:
    """Bytes that a pruned cache should take; NaN for a model some of whose layers keep a window."""
    sites = attention_sites(model)
    if len(sites) < model.config.get_text_config().num_hidden_layers:
        return float("nan")
    channels = sum(2 * site.num_kv_heads * site.head_dim for site in sites)
    # A ThinKPress drops channels of keys only.
    evicted = condition.ratio / (2 if condition.press == "ThinKPress" else 1)
    return model.dtype.itemsize * channels * tokens * (1 - evicted)


# ---- what fits -----------------------------------------------------------------------------------

PRECISION = 1 / 16
"""Of what is found, as a share of it."""


def largest(fits: Callable[[int], bool], guess: int, most: int = 2**24) -> int:
    """The largest number that fits, by bisection, if all smaller ones do.

    Args:
        guess: where to begin, at least 1.
        most: beyond which nothing is tried.

    Returns:
        The number, no more than `PRECISION` below the first that does not fit; 0: none does.
    """
    fitting, too_large = 0, most + 1
    tried = max(1, min(guess, most))
    while too_large - fitting > max(1, PRECISION * fitting):
        if fits(tried):
            fitting = tried
        else:
            too_large = tried
        tried = (fitting + too_large) // 2
        if too_large > most and fitting:
            tried = min(most, max(fitting + 1, int(1.5 * fitting)))
    return fitting


def longest(spec: ModelSpec, condition: Condition, room: int, batch: int, guess: int) -> int:
    """Tokens of the longest context with which an answer takes no more than `room` bytes."""

    def fits(context: int) -> bool:
        peak = peak_of(spec, condition, context, batch, tokens=1)
        return peak is not None and peak <= room

    return largest(fits, guess)
