"""What a second transformers leaves out, what is run first, and what all tests share."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import hooks_impl
import patch_impl

INDEPENDENT = {
    "attention_patch/test_kernels.py": "attention over packed keys",
    "attention_patch/test_reversible.py": "patches of any object",
    "attention_patch/test_reversible_copies.py": "copies of patched objects",
    "experiments/test_audit.py": "what is found of what is planted; intrusiveness audits presses",
    "experiments/test_cli.py": "the commands and their errors",
    "experiments/test_command.py": "options as flags",
    "experiments/test_datasets.py": "samples and metrics of datasets",
    "experiments/test_intervals.py": "intervals",
    "experiments/test_manifest.py": "what a study writes about itself",
    "experiments/test_quotable.py": "tables that are quoted",
    "experiments/test_ray.py": "how work is spread",
    "experiments/test_readme.py": "tables of the README",
    "experiments/test_study.py": "report, figures and the README's tables",
    "press_core/test_fuzzed_fits.py": "files of what presses have learned",
    "press_core/test_properties.py": "formulas on calls of the tests' own making",
    "press_core/test_select.py": "choosing by scores",
    "press_core/test_tampered_files.py": "files that were tampered with",
    "test_docs.py": "the documentation",
    "test_house.py": "who may call whom, and fields of presses",
}
"""Files about what is the same with every release of transformers."""

MEASURING = {
    f"experiments/test_{name}.py": f"how {what} measured"
    for name, what in {
        "error": "errors are",
        "evaluate": "answers are",
        "headwise": "head-wise budgets are",
        "headwise_variants": "ways of head-wise attention are",
        "intrusiveness": "what a mechanism touches is",
        "overhead": "the time that a scope costs is",
        "quality": "answers of a trained model are",
        "sinks": "attention to first tokens is",
        "streaming": "streams are",
        "throughput": "speed is",
        "trace": "what one forward does is",
    }.items()
}
"""Files about experiments that `experiments/test_own_model.py` runs, whole, with any release."""

LEFT_OUT = INDEPENDENT | MEASURING
TESTS = Path(__file__).parent
FIRST = {TESTS / "test_tensor_parallel.py", TESTS / "experiments" / "test_ray.py"}
"""Files whose tests share what takes long to start: processes that share the work take over what
comes last, and would start it once more."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--second-transformers",
        action="store_true",
        help="leave out what is the same with every release of transformers, and how things are "
        "measured: files that tests/conftest.py lists, which have to be run with another release",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.getoption("second_transformers"):
        return []
    return [
        "left out, for another release of transformers is tested with it:",
        *(f"  tests/{name}: {what}" for name, what in LEFT_OUT.items()),
    ]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    left_out = config.getoption("second_transformers") and collection_path.is_relative_to(TESTS)
    if left_out and collection_path.relative_to(TESTS).as_posix() in LEFT_OUT:
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path not in FIRST)


def pytest_configure() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules and tests come to stay: the search for garbage leaves them out, and is rarer."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture
def package(request: pytest.FixtureRequest) -> ModuleType:
    """Hooks or patches, one for each case: `test_hooks_equal_patches.py` shows them alike.

    Where they could differ a test asks for `tests.support.both`.
    """
    return (hooks_impl, patch_impl)[zlib.crc32(request.node.nodeid.encode()) % 2]


@pytest.fixture(autouse=True)
def _without_gradients(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of whole models ask for gradients where they are about them."""
    with torch.set_grad_enabled(request.path.parent not in (TESTS, TESTS / "attention_patch")):
        yield
