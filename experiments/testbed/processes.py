"""Measure in a process of its own, whose memory no earlier measurement has arranged."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

ResultT = TypeVar("ResultT")


def in_new_process(function: Callable[..., ResultT], *args: Any) -> ResultT:
    """What a function of a module returns in a new process, with as many threads as here.

    Raises:
        BrokenProcessPool: if the process ends early, for example because memory ran out.
        Exception: what `function` raises.
    """
    threads = torch.set_num_threads, (torch.get_num_threads(),)
    with ProcessPoolExecutor(1, _context(), *threads) as process:
        return process.submit(function, *args).result()


@cache
def _context() -> Any:
    """A process context in which torch and transformers are imported, if forkserver exists."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.testbed.timed_models"])
    return context
