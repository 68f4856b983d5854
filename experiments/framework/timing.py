"""Interleaved timing: conditions take turns, so that load on the machine affects all of them."""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

ConditionT = TypeVar("ConditionT", bound=Hashable)
"""The key of a compared condition."""

Array = np.ndarray[Any, Any]


def each_in_turn(
    conditions: list[ConditionT],
    timed: Callable[[ConditionT], Any],
    *,
    rounds: int,
    advance: Callable[[], object] = lambda: None,
) -> dict[ConditionT, Array]:
    """Call `timed` for every condition in each round, with garbage collection disabled.

    Args:
        timed: times one condition and returns its seconds, one number or several.
        rounds: number of measured rounds; a warm-up round precedes them.
        advance: called after each measured round.

    Returns:
        For each condition an array with `rounds` rows.
    """
    taken: dict[ConditionT, list[Any]] = {name: [] for name in conditions}
    gc.collect()
    with no_garbage_collection():
        for index in range(rounds + 1):
            first = index % len(conditions)  # rotate, so that the first condition changes
            for name in conditions[first:] + conditions[:first]:
                taken[name].append(timed(name))
            if index:
                advance()
    return {name: np.array(times[1:]) for name, times in taken.items()}


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's garbage collection within the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads within the block."""
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)


class Stopwatch:
    """Measures the seconds of consecutive laps: with CUDA events on a GPU, else with the clock.

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
        """End a lap; it covers the work launched since the previous one."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(perf_counter())

    def seconds(self) -> list[float]:
        """The seconds of each lap."""
        between = zip(self._marks, self._marks[1:], strict=False)
        if not self._on_gpu:
            return [after - before for before, after in between]
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in between]
