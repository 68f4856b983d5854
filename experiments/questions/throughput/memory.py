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
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from experiments import UserError
from experiments.questions.throughput.speed import answer
from experiments.testbed.timed_models import FULL, Condition, ModelSpec, random_context, scope_of
from press_core import UnsupportedModelError, attention_sites


class Run(NamedTuple):
    """One answer whose memory is measured."""

    condition: Condition
    context: int
    batch: int
    tokens: int


def peak_of(spec: ModelSpec, run: Run) -> int | None:
    """Bytes that a run takes at most, beyond those that the loaded model takes.

    Returns:
        None if there was not enough memory; a process that asks for too much may be ended.
    """
    try:
        with ProcessPoolExecutor(1, _processes()) as process:
            return process.submit(_in_process, spec, run, torch.get_num_threads()).result()
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


def _in_process(spec: ModelSpec, run: Run, threads: int) -> int:
    torch.set_num_threads(threads)
    with suppress(AttributeError, OSError, TypeError):  # other C libraries than glibc
        libc = ctypes.CDLL(None)
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            libc.mallopt(parameter, 2**16)
    model = spec.load()
    opens = scope_of(run.condition, model, run.context)
    ids = random_context(model, run.batch, run.context)
    answer(model, ids[:1, :16], scope_of(FULL, model, 16), run.tokens)  # threads and their buffers
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        answer(model, ids, opens, run.tokens)
        return torch.cuda.max_memory_allocated() - before
    before = _resident("VmRSS")
    with suppress(OSError):  # else the peak includes that of loading
        Path("/proc/self/clear_refs").write_text("5")
    answer(model, ids, opens, run.tokens)
    return max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    """Resident bytes of this process, now or at most; at most, if the system tells only that."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
        return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:
        raise UnsupportedModelError(
            "this system does not tell how much memory a process takes; run with --no-memory"
        ) from None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


# ---- by arithmetic -------------------------------------------------------------------------------


class Arithmetic(NamedTuple):
    """What a model whose layers all attend to all tokens takes while it reads a context.

    Attributes:
        weights: bytes of the model.
        cache: of the whole cache, per token.
        layer: of one layer's share of it, which is there whole before it is pruned.
        working: of what a layer computes with, per token.
    """

    weights: int
    cache: float
    layer: float
    working: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Arithmetic:
        """That of a model.

        Raises:
            UserError: if some layers keep a sliding window.
        """
        sites, config = attention_sites(model), model.config.get_text_config()
        if len(sites) < config.num_hidden_layers:
            raise UserError(
                f"some layers of this {type(model).__name__} keep a sliding window, and the "
                "arithmetic is that of layers which keep all tokens; give a model without them"
            )
        weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
        width, inner = config.hidden_size, getattr(config, "intermediate_size", 0)
        heads = config.num_attention_heads * sites[0].head_dim
        keys = 2 * sites[0].num_kv_heads * sites[0].head_dim
        # In attention the stream, its norm, queries and keys before and after rotation, the output;
        # in the MLP the stream, its norm, and the gate, what it gates and their product.
        attention, mlp = 2 * width + 3 * heads + 2 * keys, 2 * width + 3 * inner
        size, layer = model.dtype.itemsize, keys * model.dtype.itemsize
        return cls(weights, layer * len(sites), layer, size * max(attention, mlp))

    def cache_bytes(self, tokens: int, condition: Condition) -> float:
        """Of a pruned cache, of all rows together."""
        return self.cache * tokens * (1 - _evicted(condition))

    def tokens(self, limit: float, condition: Condition) -> int:
        """How many tokens of context fit in `limit` bytes, in all rows together."""
        share = _evicted(condition)
        per_token = self.cache * (1 - share) + self.layer * share + self.working
        return max(0, int((limit - self.weights) / per_token))


def _evicted(condition: Condition) -> float:
    """Share of a cache's bytes that a condition frees; a ThinKPress drops channels of keys only."""
    return condition.ratio / (2 if condition.press == "ThinKPress" else 1)


# ---- what fits -----------------------------------------------------------------------------------

PRECISION = 1 / 16
"""Of what is found, as a share of it."""

MOST = 2**24
"""Beyond which nothing is tried."""

CONTEXT, BATCH = "context", "batch"


def largest(fits: Callable[[int], bool], guess: int, most: int = MOST) -> tuple[int, int]:
    """The largest number that fits, by bisection, if all smaller ones do.

    Args:
        guess: where to begin, at least 1.
        most: beyond which nothing is tried.

    Returns:
        The number, no more than `PRECISION` below the first that does not fit; 0: none does. And
        how often `fits` was called.
    """
    fitting, too_large, n_tried = 0, most + 1, 0
    tried = max(1, min(guess, most))
    while too_large - fitting > max(1, PRECISION * fitting):
        n_tried += 1
        if fits(tried):
            fitting = tried
        else:
            too_large = tried
        tried = (fitting + too_large) // 2
        if too_large > most and fitting:
            tried = min(most, max(fitting + 1, int(1.25 * fitting)))
    return fitting, n_tried


def fitting_row(
    spec: ModelSpec, budget: Arithmetic, condition: Condition, limit: int, what: str, other: int
) -> dict[str, Any]:
    """The longest context at a batch of `other`, or the largest batch at a context of `other`."""
    peaks: dict[int, int | None] = {}

    def fits(n: int) -> bool:
        sizes = (n, other) if what == CONTEXT else (other, n)
        peak = peaks[n] = peak_of(spec, Run(condition, *sizes, tokens=1))
        return peak is not None and budget.weights + peak <= limit

    predicted = budget.tokens(limit, condition) // other
    measured, n_tried = largest(fits, max(predicted, 16 if what == CONTEXT else 1))
    row = {"what": what, "other": other, **condition._asdict(), "limit": limit}
    row |= {"measured": measured, "predicted": predicted}
    return row | {"peak": peaks.get(measured), "tried": n_tried}
