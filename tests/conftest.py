"""What a second transformers leaves out, the order of tests, and what they share.

Where processes share the tests, the one that hands them out reads this file too and runs none:
torch is imported where tests are, which saves the seconds that the others would wait for it.
"""

import gc
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

LEFT_OUT = {
    f"{folder}/test_{name}.py".removeprefix("./")
    for folder, names in [
        # What is the same with every release of transformers.
        ("attention_patch", "kernels reversible reversible_copies"),
        ("experiments", "audit cli command datasets intervals manifest quotable ray readme study"),
        ("press_core", "decisions eviction formulas learned learned_budgets learning masks"),
        ("press_core", "properties replayed scope select tampered_files"),
        (".", "changing_scopes_while_running compositions dms docs house"),
        (".", "learned_headwise learned_presses new_presses offloaded_weights"),
        (".", "presses_of_ones_own replaying state_machine"),
        # How things are measured, which `test_own_model.py` runs, whole, with any release.
        ("experiments", "claim equivalence error evaluate headwise headwise_variants"),
        ("experiments", "intrusiveness isolation overhead quality questions recipes seeds"),
        ("experiments", "settings sinks streaming sweeps throughput trace"),
    ]
    for name in names.split()
}
"""Files that a second transformers leaves out."""
TESTS = Path(__file__).parent
FIRST = {TESTS / "test_tensor_parallel.py", TESTS / "experiments" / "test_ray.py"}
"""Files whose tests share what takes long to start: processes that share the work take over what
comes last, and would start it once more."""
LAST = TESTS / "experiments" / "test_architectures.py"
"""It loads the modules of dozens of models, and audits look through all that are loaded."""


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
        "left out, for another release of transformers is tested with it:",
        *(f"  tests/{name}" for name in sorted(LEFT_OUT)),
    ]


def pytest_ignore_collect(collection_path, config):
    left_out = config.getoption("second_transformers") and collection_path.is_relative_to(TESTS)
    if left_out and collection_path.relative_to(TESTS).as_posix() in LEFT_OUT:
        return True
    return None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (item.path == LAST, item.path not in FIRST))


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        return
    gc.disable()
    from torch.utils import cpp_extension

    cpp_extension.load = unpacking


def unpacking(name, **_):
    """What quanto would compile, for a minute on each machine: `unpack(codes, bits)` in Python."""
    import torch

    assert name == "quanto_cpp"
    return SimpleNamespace(
        unpack=lambda codes, bits: torch.cat(
            [codes >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        )
    )


def pytest_collection_finish():
    """Modules and tests come to stay: the search for garbage leaves them out, and is rarer."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture
def package(request):
    """Hooks or patches, one for each case: `test_hooks_equal_patches.py` shows them alike.

    Where they could differ a test asks for `tests.support.both`.
    """
    import hooks_impl
    import patch_impl

    return (hooks_impl, patch_impl)[zlib.crc32(request.node.nodeid.encode()) % 2]


@pytest.fixture
def no_graphs_after():
    """For tests that compile: each scope that hooks open looks through all graphs that there are.

    They would drop them, and with them names in modules that other tests compare.
    """
    import torch

    yield
    torch._dynamo.reset()


@pytest.fixture
def not_compiled(no_graphs_after):
    """Of flex_attention: a kernel takes a C++ compiler and half a minute per shape."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(autouse=True)
def _without_gradients(request):
    """Tests of whole models ask for gradients where they are about them."""
    import torch

    with torch.set_grad_enabled(TESTS / "experiments" in request.path.parents):
        yield
