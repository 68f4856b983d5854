"""What a second transformers leaves out, and the order of tests."""

import math
import os
import zlib
from collections import defaultdict
from pathlib import Path

import yaml

# A process for each core, one thread each: tests of small models gain nothing from threads, and a
# fork of a process that has started some waits for them forever.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, and by subprocesses

TESTS = Path(__file__).parent
LEFT_OUT = {
    f"{folder}/test_{name}.py".removeprefix("./")
    for of_folders in yaml.safe_load((TESTS / "left_out.yaml").read_text()).values()
    for folder, names in of_folders.items()
    for name in names.split()
}
"""Files that a second transformers leaves out."""
FIRST = {TESTS / "test_tensor_parallel.py", TESTS / "experiments" / "test_ray.py"}
"""Files whose tests share what takes long to start: processes that share the work take over what
comes last, and would start it once more."""
LAST = TESTS / "experiments" / "test_architectures.py"
"""It loads the modules of dozens of models, and audits look through all that are loaded."""
SHARE = 4
"""Of this many cases of a test a second transformers runs one, drawn by their names."""


def pytest_addoption(parser):
    parser.addoption(
        "--second-transformers",
        action="store_true",
        help="leave out what is the same with every release of transformers, and how things are "
        "measured: files that tests/conftest.py lists, which have to be run with another release",
    )


def pytest_report_header(config):
    if not config.getoption("second_transformers"):
        return []
    return [
        f"left out, for another release of transformers is tested with it: of {SHARE} cases of a "
        "test all but one, where they are no models, and",
        *(f"  tests/{name}" for name in sorted(LEFT_OUT)),
    ]


def pytest_ignore_collect(collection_path, config):
    is_second = config.getoption("second_transformers") and collection_path.is_relative_to(TESTS)
    return (is_second and collection_path.relative_to(TESTS).as_posix() in LEFT_OUT) or None


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: (item.path == LAST, item.path not in FIRST))
    if config.getoption("second_transformers"):
        run = _drawn(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in run])
        items[:] = [item for item in items if item in run]


def _drawn(items):
    """What a second transformers runs: at least one case of each test, and all models."""
    cases = defaultdict(list)
    for item in items:
        key = item.nodeid if item.path == LAST else (item.path, item.originalname)
        cases[key].append(item)
    drawn = set()
    for of_test in cases.values():
        of_test.sort(key=lambda item: zlib.crc32(item.nodeid.encode()) >> 1)
        drawn.update(of_test[: math.ceil(len(of_test) / SHARE)])
    return drawn


def pytest_configure(config):
    """Load `fixtures.py` where tests are run: who hands them out would import torch for nothing."""
    if not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")
