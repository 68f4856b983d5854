"""Time and memory of an answer, from an empty cache to the last token, and the longest context.

Conditions are timed in turn, and divided round by round. Peak memory is counted beyond the loaded
model: on a GPU by torch's allocator, on a CPU as the resident size of the process. Each answer runs
in a new process, so that it cannot reuse memory of an earlier one, and the C library returns freed
memory immediately, so that peak memory does not decrease with the length of the context.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.framework.intervals import median_of
from experiments.framework.timing import Array, Stopwatch, each_in_turn
from experiments.testbed import timed_models
from experiments.testbed.processes import in_new_process
from experiments.testbed.timed_models import EAGER, FULL, Condition, ModelSpec, Opens, Way, scope_of
from press_core import UnsupportedModelError, attention_sites, cache_nbytes
from press_core.forward import with_cache

# ---- time ----------------------------------------------------------------------------------------

_WARM_UP = 3
"""Steps before those that are timed: the first ones after a prefill are slower, or compile."""

KEPT = "speed_over_kept"
"""Tokens per second over those of a plain cache with as many tokens as the press keeps."""


@torch.inference_mode()
def answer(
    model: PreTrainedModel, ids: Tensor, opens: Opens, tokens: int, way: Way = EAGER
) -> tuple[float, float, int]:
    """Prefill a context and decode greedily, with the scope open throughout.

    Args:
        ids: `(B, S)` token ids of the context.
        tokens: number of timed tokens, after the first and those of a warm-up.
        way: how to decode; the prefill is not compiled.

    Returns:
        Seconds to the first token, seconds per timed token, and the size of the cache in bytes
        after the first token.
    """
    with opens(), way.running(model) as run:
        cache = way.empty_cache(model, ids.shape[1] + _WARM_UP + tokens)
        given, watch = with_cache(model, cache), Stopwatch(model.device)
        token = _next(model, ids, logits_to_keep=1, **given)
        watch.lap()
        n_bytes = cache_nbytes(cache)
        for _ in range(_WARM_UP):
            token = _next(run, token, **given)
        watch.lap()
        for _ in range(tokens):
            token = _next(run, token, **given)
        watch.lap()
        first, _, rest = watch.seconds()
    return first, rest / tokens, n_bytes


def _next(model: Any, ids: Tensor, **given: Any) -> Tensor:
    """The likeliest next token, `(B, 1)` int64."""
    return model(input_ids=ids, **given).logits[:, -1:].argmax(dim=-1)


def speeds(
    spec: ModelSpec,
    chosen: Sequence[Condition],
    contexts: Sequence[int],
    batches: Sequence[int],
    tokens: int,
    rounds: int,
    way: Way = EAGER,
    of_kvpress: Mapping[str, type[Any]] | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """A row per context, batch and condition; see `Throughput.measure`.

    Args:
        chosen: the conditions, including `FULL`; with another ratio, `FULL` has a context shorter
            by it, of as many tokens as a press keeps.
        tokens: number of tokens to decode in each answer, after the first.
        rounds: how often every condition is timed.
        way: how to decode.
        of_kvpress: the presses of kvpress, if it is imported.
        advance: called after each round.

    Raises:
        PressError: if the model does not support a press; before anything is measured.
    """
    model = spec.load()
    opened = {n: {one: scope_of(one, model, n, of_kvpress) for one in chosen} for n in contexts}
    for context, scopes in opened.items():
        for batch in batches:
            ids = timed_models.random_context(model, batch, context)

            def timed(one: Condition, ids: Tensor = ids, scopes: Any = scopes) -> Any:
                n = given_to(one, ids.shape[1])
                return answer(model, ids[:, :n], scopes[one], tokens, way)

            times = each_in_turn(list(scopes), timed, rounds=rounds, advance=advance)
            labels = {"model": spec.name, "context": context, "batch": batch, **way._asdict()}
            yield from (labels | row for row in _rows(times, batch))


def given_to(condition: Condition, context: int) -> int:
    """How many tokens of a context are run: without a press, as many as a press would keep."""
    return context - int(context * condition.ratio) * (condition.press == FULL.press)


def _rows(times: Mapping[Condition, Array], batch: int) -> Iterator[dict[str, Any]]:
    for condition, taken in times.items():
        first, step, held = taken.T
        row = {**condition._asdict(), "rounds": len(taken)}
        row |= median_of("first", first / times[FULL][:, 0], of="first_")
        row |= median_of("speed", times[FULL][:, 1] / step, of="speed_")
        baselines = {"speed_over_hook": condition._replace(mechanism="hook")}
        baselines[KEPT] = FULL._replace(ratio=condition.ratio)
        for name, baseline in baselines.items():
            if baseline in times and baseline not in (condition, FULL):
                row |= median_of(name, times[baseline][:, 1] / step, of=f"{name}_")
        row |= {"first_ms": 1e3 * float(np.median(first))}
        row |= {"tokens_per_s": batch / float(np.median(step))}
        yield row | {"bytes": int(held[-1])}


# ---- memory --------------------------------------------------------------------------------------


def peak_of(
    spec: ModelSpec, condition: Condition, context: int, batch: int, tokens: int
) -> int | None:
    """Peak memory of an answer in bytes, beyond that of the loaded model.

    Returns:
        None if memory ran out, which includes a process killed by the system.
    """
    try:
        return in_new_process(_in_process, spec, condition, context, batch, tokens)
    except (BrokenProcessPool, MemoryError, torch.OutOfMemoryError):
        return None


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _in_process(
    spec: ModelSpec, condition: Condition, context: int, batch: int, tokens: int
) -> int:
    with suppress(AttributeError, OSError, TypeError):  # other C libraries than glibc
        libc = ctypes.CDLL(None)
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(parameter, 2**16)
    model = spec.load()
    opens = scope_of(condition, model, context)
    ids = timed_models.random_context(model, batch, given_to(condition, context))
    answer(model, ids[:1, :16], scope_of(FULL, model, 16), tokens)  # start threads and buffers
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        answer(model, ids, opens, tokens)
        return torch.cuda.max_memory_allocated() - before
    with suppress(OSError):  # reset the peak; without this it includes loading the model
        Path("/proc/self/clear_refs").write_text("5")
    before = _most_resident()
    answer(model, ids, opens, tokens)
    return _most_resident() - before


def _most_resident() -> int:
    """Peak resident size of this process in bytes."""
    try:
        import resource
    except ImportError:
        raise UnsupportedModelError(
            "this system does not report the memory of a process; run with --no-memory"
        ) from None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def cache_bytes(model: PreTrainedModel, tokens: int, condition: Condition) -> float:
    """Expected bytes of a pruned cache; NaN if some layers of the model have a sliding window."""
    sites = attention_sites(model)
    if len(sites) < model.config.get_text_config().num_hidden_layers:
        return float("nan")
    channels = sum(2 * site.num_kv_heads * site.head_dim for site in sites)
    # A ThinKPress evicts channels of the keys only.
    evicted = condition.ratio / (2 if condition.press == "ThinKPress" else 1)
    return model.dtype.itemsize * channels * tokens * (1 - evicted)


# ---- what fits -----------------------------------------------------------------------------------

PRECISION = 1 / 16
"""Precision of the longest context, as a share of it."""


def largest(fits: Callable[[int], bool], guess: int, most: int = 2**24) -> int:
    """The largest number that fits, by bisection; every smaller number has to fit as well.

    Args:
        guess: first number to test, at least 1.
        most: largest number to test.

    Returns:
        The number, at most a share `PRECISION` below the first that does not fit; 0 if none fits.
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
    """Tokens of the longest context with which an answer takes at most `room` bytes."""

    def fits(context: int) -> bool:
        peak = peak_of(spec, condition, context, batch, tokens=1)
        return peak is not None and peak <= room

    return largest(fits, guess)
