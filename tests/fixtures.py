"""What all tests share."""

import gc
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from torch.utils import cpp_extension

with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):  # hqq, which it imports, loads a compiler
    import transformers.cache_utils  # noqa: F401

import hooks_impl
import patch_impl
from press_core.forward import current
from tests.support import build, unchanged

EXPERIMENTS = Path(__file__).parent / "experiments"


def pytest_configure():
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")
    gc.disable()
    cpp_extension.load = unpacking


def unpacking(name, **_):
    """What quanto would compile, for a minute on each machine: `unpack(codes, bits)` in Python."""
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


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def package(request):
    """Hooks or patches, one for each case: `test_hooks_equal_patches.py` shows them alike.

    Where they could differ a test asks for `tests.support.both`.
    """
    return (hooks_impl, patch_impl)[zlib.crc32(request.node.nodeid.encode()) % 2]


@pytest.fixture
def model():
    return build("llama", num_layers=3)


@pytest.fixture
def left_as_it_was(model):
    """The model of a test, and what is known of the forward that runs."""
    with unchanged(model):
        yield
    assert current.forward is None


@pytest.fixture
def no_graphs_after():
    """For tests that compile: each scope that hooks open looks through all graphs that there are.

    They would drop them, and with them names in modules that other tests compare.
    """
    yield
    torch._dynamo.reset()


@pytest.fixture
def not_compiled(no_graphs_after):
    """Of flex_attention: a kernel takes a C++ compiler and half a minute per shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(autouse=True)
def _without_gradients(request):
    """Tests of whole models ask for gradients where they are about them."""
    with torch.set_grad_enabled(EXPERIMENTS in request.path.parents):
        yield
