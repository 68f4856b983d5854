"""Running the cells of a sweep: one after the other, or spread over a Ray cluster.

Every engine takes pieces of work and a function, and yields each piece with its outcome when it is
finished. If a piece fails, its outcome is a `Failure`, and the others still run.
"""

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments import UserError, library, refusing
from experiments.framework.wording import in_one_line

Outcomes = Iterator[tuple[Any, Any]]
"""Pieces of work, each with its result or a `Failure`."""


class Failure(NamedTuple):
    """Why a piece of work has no result, in one line."""

    reason: str


def serial(work: Iterable[Any], run: Callable[[Any], Any]) -> Outcomes:
    """Run one piece after the other in this process."""
    for piece in work:
        yield piece, _attempt(run, piece)


def on_ray(
    work: Iterable[Any],
    run: Callable[[Any], Any],
    *,
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    retries: int = 3,
) -> Outcomes:
    """Run pieces on the workers of a Ray cluster, as resources become free.

    If a worker dies, its piece runs again. Results are returned to this process, which writes them.

    Args:
        address: address of a cluster; None: start one on this machine and stop it at the end.
        cpus, gpus: resources that each piece needs.
        retries: how often a piece runs again after its worker has died.

    Raises:
        UserError: if Ray is not installed, the cluster cannot be reached, or it has no such worker.
    """
    ray = library("ray", "ray", ", or leave out --on ray")
    joined = ray.is_initialized()
    if not joined:
        _start(ray, address)
    try:
        _check_room(ray, cpus, gpus)
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=retries)(_attempt)
        pending = {task.remote(run, piece): piece for piece in work}
        while pending:
            (done,), _ = ray.wait(list(pending), num_returns=1)
            yield pending.pop(done), _outcome(ray, done, retries)
    finally:
        if not joined:
            ray.shutdown()


def _attempt(run: Callable[[Any], Any], piece: Any) -> Any:
    try:
        return run(piece)
    except Exception as error:
        return Failure(in_one_line(error))


def _start(ray: Any, address: str | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        # Workers import this package from the same folder, whether it is installed or not.
        here = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        options |= {"runtime_env": {"env_vars": {"PYTHONPATH": path}}, "include_dashboard": False}
    with refusing(f"there is no Ray cluster at {address!r}", OSError):  # ConnectionError is one
        host, _, port = (address or "").rpartition(":")
        if port.isdecimal() and "//" not in host:  # fail fast: Ray would retry for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, **options)


def _check_room(ray: Any, cpus: float, gpus: float) -> None:
    """Raise if no node has the resources, for which Ray would wait forever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(n.get("CPU", 0) >= cpus and n.get("GPU", 0) >= gpus for n in nodes):
        raise UserError(
            f"a cell needs {cpus:g} CPUs and {gpus:g} GPUs, which no node of the Ray cluster has; "
            "lower --threads, or join a larger cluster with --ray-address"
        )


def _outcome(ray: Any, reference: Any, retries: int) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        first = str(error).strip().splitlines()[0]
        return Failure(f"its worker died {retries + 1} times: {type(error).__name__}: {first}")
