"""What an answer takes, from an empty cache to the last token: time, memory, and what fits.

Times are taken in turn, and divided round by round. On a GPU the most memory that an answer takes
beyond the model itself is what torch's allocator says; on a CPU, the resident size of a process.
So that no answer finds what an earlier one left, each has a process of its own; and so that a token
more never takes less, the C library is told to give back at once what is freed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from experiments.framework.shared import median_of
from experiments.framework.timing import Array, Stopwatch, each_in_turn
from experiments.testbed import timed_models
from experiments.testbed.timed_models import FULL, Condition, ModelSpec, Opens, scope_of
from press_core import UnsupportedModelError, attention_sites, cache_nbytes

# ---- time ----------------------------------------------------------------------------------------


@torch.inference_mode()
def answer(
    model: PreTrainedModel, ids: Tensor, opens: Opens, tokens: int
) -> tuple[float, float, int]:
    """Read a context and decode greedily, the scope open all the while.

    Args:
        ids: `(B, S)`.
        tokens: to decode after the first.

    Returns:
        Seconds from the context to the first token, seconds of each further token, and bytes of the
        cache after the first token.
    """
    with opens():
        cache = DynamicCache(config=model.config)
        watch = Stopwatch(model.device)
        token = _next(model, ids, cache, logits_to_keep=1)
        watch.lap()
        n_bytes = cache_nbytes(cache)
        watch.lap()
        for _ in range(tokens):
            token = _next(model, token, cache)
        watch.lap()
        first, _, rest = watch.seconds()
    return first, rest / tokens, n_bytes


def _next(model: Any, ids: Tensor, cache: DynamicCache, **more: Any) -> Tensor:
    """`(B, 1)`, the likeliest next token."""
    logits = model(input_ids=ids, past_key_values=cache, **more).logits
    return logits[:, -1:].argmax(dim=-1)


def speeds(
    spec: ModelSpec,
    asked: Sequence[Condition],
    contexts: Sequence[int],
    batches: Sequence[int],
    tokens: int,
    rounds: int,
    of_kvpress: Mapping[str, type[Any]] | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """A row per context, batch and condition; see `Throughput.measure`.

    Args:
        asked: the conditions, `FULL` among them.
        tokens: decoded in each answer, after the first.
        rounds: in which all take their turn.
        of_kvpress: its presses, where it is imported.
        advance: called after each round.

    Raises:
        PressError: if the model does not suit a press; before anything is measured.
    """
    model = spec.load()
    opened = {n: {one: scope_of(one, model, n, of_kvpress) for one in asked} for n in contexts}
    for context, scopes in opened.items():
        for batch in batches:
            ids = timed_models.random_context(model, batch, context)

            def timed(one: Condition, ids: Tensor = ids, scopes: Any = scopes) -> Any:
                return answer(model, ids, scopes[one], tokens)

            times = each_in_turn(list(scopes), timed, rounds=rounds, advance=advance)
            for row in _rows(times, batch):
                yield {"model": spec.name, "context": context, "batch": batch} | row


def _rows(times: Mapping[Condition, Array], batch: int) -> Iterator[dict[str, Any]]:
    for condition, taken in times.items():
        first, step, held = taken.T
        row = {**condition._asdict(), "rounds": len(taken)}
        row |= median_of("first", first / times[FULL][:, 0], of="first_")
        row |= median_of("speed", times[FULL][:, 1] / step, of="speed_")
        hook = times.get(condition._replace(mechanism="hook"))
        if hook is not None and condition.mechanism != "hook":
            row |= median_of("speed_over_hook", hook[:, 1] / step, of="speed_over_hook_")
        row |= {"first_ms": 1e3 * float(np.median(first))}
        row |= {"tokens_per_s": batch / float(np.median(step))}
        yield row | {"bytes": int(held[-1])}


# ---- memory --------------------------------------------------------------------------------------


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
    opens = scope_of(condition, model, context)
    ids = timed_models.random_context(model, batch, context)
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
