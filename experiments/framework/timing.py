"""Times taken in turn, so that a busy moment of the machine meets all that is compared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

ConditionT = TypeVar("ConditionT", bound=Hashable)
"""What names one of the things that are compared."""

Array = np.ndarray[Any, Any]


def each_in_turn(
    conditions: list[ConditionT],
    timed: Callable[[ConditionT], Any],
    *,
    rounds: int,
    advance: Callable[[], object] = lambda: None,
) -> dict[ConditionT, Array]:
    """Call `timed` for every condition, in turn, without collecting garbage.

    Args:
        timed: from a condition to what is to be kept of it: seconds, or several of them.
        rounds: how often; one round more goes before them and is not kept.
        advance: called after each round that counts.

    Returns:
        Per condition an array of `rounds` rows.
    """
    taken: dict[ConditionT, list[Any]] = {name: [] for name in conditions}
    gc.collect()
    with no_garbage_collection():
        for index in range(rounds + 1):
            first = index % len(conditions)  # who begins changes: none always follows the same
            for name in conditions[first:] + conditions[:first]:
                taken[name].append(timed(name))
            if index:
                advance()
    return {name: np.array(times[1:]) for name, times in taken.items()}


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Nothing is collected for as long as the block lasts."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """That many threads of torch, for as long as the block lasts."""
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)


class Stopwatch:
    """Seconds of one piece of work after the other: CUDA events on a GPU, the clock elsewhere.

    ```python
    watch = Stopwatch(model.device)
    prefill()
    watch.lap()
    decode()
    watch.lap()
    prefill_seconds, decode_seconds = watch.seconds()
    ```
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
        self.lap()

    def lap(self) -> None:
        """What was started before belongs to this lap."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(perf_counter())

    def seconds(self) -> list[float]:
        """Of each lap."""
        between = zip(self._marks, self._marks[1:], strict=False)
        if not self._on_gpu:
            return [after - before for before, after in between]
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in between]
