"""Sweeps on a Ray cluster: the same numbers, and workers that die."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from experiments import UserError
from experiments.answers.engines import Failure, on_ray
from tests.experiments.sweeping import SMALL, run_sweep

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")

SETTINGS = replace(
    SMALL,
    dataset=("facts/single@48", "facts/multikey@48"),
    press=("AdaKVPress(SnapKVPress(window_size=8))",),
    samples=6,
)


@pytest.fixture(scope="module")
def cluster():
    """Two workers, which find these tests and this project."""
    path = str(Path(__file__).resolve().parents[2])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _system_config={"worker_niceness": 0},  # other tests run beside these
        runtime_env={"env_vars": {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}},
    )
    yield
    ray.shutdown()


# Functions of a test's own travel to the workers by value: these need not import torch for them.


@pytest.mark.usefixtures("cluster")
def test_everything_is_run_though_a_worker_dies(tmp_path):
    marker = tmp_path / "died"

    def dies_once(n):
        if n == 2 and not marker.exists():
            marker.touch()
            os._exit(1)
        return n * n

    assert sorted(on_ray(range(8), dies_once, retries=1)) == [(n, n * n) for n in range(8)]
    assert marker.exists()
    assert ray.is_initialized()  # a cluster that was joined stays


@pytest.mark.usefixtures("cluster")
def test_what_goes_wrong_with_one_is_its_own():
    def goes_wrong(n):
        if n == 1:
            raise ValueError("one\n  is not enough")
        if n == 2:
            os._exit(1)
        return n * n

    found = dict(on_ray(range(4), goes_wrong, retries=1))
    assert found[1] == Failure("ValueError: one is not enough")
    assert isinstance(found[2], Failure)
    assert found[2].reason.startswith("its worker died 2 times")
    assert (found[0], found[3]) == (0, 9)


@pytest.mark.usefixtures("cluster")
def test_what_no_node_can_run_is_refused():
    with pytest.raises(UserError, match="64 CPUs and 0 GPUs"):
        list(on_ray([1], str, cpus=64))


def sweep_in(folder, **options):
    results, failures, _ = run_sweep(SETTINGS, folder, **options)
    assert failures == {}
    return results.drop(columns="seconds"), pd.read_csv(folder / "predictions.csv")


@pytest.mark.usefixtures("cluster")
def test_the_numbers_are_those_of_a_serial_run(tmp_path):
    serial = sweep_in(tmp_path / "serial")
    spread = sweep_in(tmp_path / "ray", cpus=2)  # one worker, as each imports torch
    for one, other in zip(serial, spread, strict=True):
        pd.testing.assert_frame_equal(one, other)
    assert len(serial[0]) == 6


def test_a_cluster_of_its_own_is_started_and_stopped():
    def waits(n):
        time.sleep(60 if n else 0)
        return n

    ray.shutdown()
    results = on_ray([0, 1, 2], waits)
    assert next(results) == (0, 0)
    start = time.monotonic()
    results.close()  # as an interrupt does
    assert time.monotonic() - start < 30
    assert not ray.is_initialized()


def test_a_cluster_that_is_not_there():
    ray.shutdown()
    with pytest.raises(UserError, match=r"'127\.0\.0\.1:1'"):
        list(on_ray([1], str, address="127.0.0.1:1"))
