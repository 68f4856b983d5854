"""Whatever a file says that was learned: it is read, or refused in one line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from io import BytesIO
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from safetensors.torch import save
from torch import Tensor

from press_core import PressError
from press_core.learned.adapter import RestoreAdapter
from press_core.learned.calibration import Calibration, CalibrationError, check_fits
from press_core.learned.duo_attention import HeadScores
from press_core.learned.expected_attention_stats import ExpectedAttentionStats
from press_core.learned.fast_kvzip import KVzipGates
from press_core.learned.kvzap import KVzapRegressor
from press_core.learned.lukv import BudgetCurves
from press_core.learned.qfilter import QFilters
from press_core.probe import attention_sites
from tests.support import build

LAYERS, HEADS, KV_HEADS, D, WIDTH = 2, 4, 2, 4, 8
RANK, N_BASE = 3, 2

GATES = KVzipGates(
    torch.rand(LAYERS, HEADS, RANK, WIDTH),
    torch.rand(LAYERS, HEADS, RANK),
    torch.rand(LAYERS, KV_HEADS, RANK, WIDTH),
    torch.rand(LAYERS, RANK),
    torch.rand(LAYERS, RANK),
    torch.rand(LAYERS, KV_HEADS, N_BASE, RANK),
    torch.rand(LAYERS, HEADS),
)
FITS: dict[str, Calibration] = {
    "gates": GATES,
    "curves": BudgetCurves(torch.rand(99, LAYERS, KV_HEADS)),
    "filters": QFilters(torch.rand(LAYERS, KV_HEADS, D)),
    "stats": ExpectedAttentionStats(torch.rand(LAYERS, HEADS, D), torch.rand(LAYERS, HEADS, D, D)),
    "head scores": HeadScores(torch.rand(LAYERS, KV_HEADS)),
    "regressor": KVzapRegressor(
        torch.rand(LAYERS, KV_HEADS, 3),
        torch.rand(LAYERS, KV_HEADS),
        torch.rand(LAYERS, 3, WIDTH),
        torch.rand(LAYERS, 3),
    ),
    "adapter": RestoreAdapter(
        torch.rand(8, WIDTH),
        {"layers.0.self_attn.q_proj": torch.rand(RANK, WIDTH)},
        {"layers.0.self_attn.q_proj": torch.rand(WIDTH, RANK)},
    ),
}
kinds = pytest.mark.parametrize("name", FITS)
fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SITE = attention_sites(
    build("llama", num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D)
)[0]
_numbers = count()

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8),
    *(torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)


def read(name: str, data: bytes, folder: Path, suffix: str = ".safetensors") -> Calibration | None:
    """What a file of `data` holds; None if it was refused, which has to be in one line."""
    path = folder / f"{next(_numbers)}{suffix}"
    path.write_bytes(data)
    fitted, refusal = _tried(lambda: type(FITS[name]).load(path))
    path.unlink()
    if fitted is None:
        assert isinstance(refusal, CalibrationError)
        return None
    assert isinstance(fitted, type(FITS[name]))
    assert all(tensor.is_floating_point() for tensor in fitted.tensors.values())
    assert not any(tensor.isnan().any() for tensor in fitted.tensors.values())
    repr(fitted)
    _tried(lambda: check_fits(fitted, SITE))
    return fitted


def _tried(call: Callable[[], Any]) -> tuple[Any, PressError | None]:
    """What `call` returns, or how it refuses."""
    try:
        return call(), None
    except PressError as error:
        refusal = error
    assert str(refusal)
    assert len(str(refusal).splitlines()) == 1
    return None, refusal


@kinds
@given(data=st.data())
@fuzzed
def test_files_with_some_other_bytes(name: str, data: Any, tmp_path: Path) -> None:
    path = FITS[name].save(tmp_path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(content), 600) - 1))
        content[place : place + 1] = data.draw(st.binary(min_size=1, max_size=20))
    length = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    read(name, bytes(content[:length]), tmp_path)


@st.composite
def contents(draw: DrawFn, name: str) -> bytes:
    """A file in which some of what belongs there is something else."""
    tensors: dict[str, Tensor] = {}
    for field, given_tensor in FITS[name].tensors.items():
        if draw(st.integers(0, 9)) == 0:
            continue
        called = field if draw(st.integers(0, 9)) else draw(st.text(max_size=8))
        if draw(st.booleans()):
            tensors[called] = given_tensor.clone()
            continue
        shape = draw(st.just(given_tensor.shape) | st.lists(st.integers(0, 4), max_size=4))
        dtype = draw(st.sampled_from(DTYPES))
        number = draw(st.sampled_from([0.0, 1.0, 0.5, -1.0, float("nan"), float("inf"), 1e38]))
        plain = torch.full(shape, number if dtype.is_floating_point else 1.0)
        tensors[called] = plain.to(dtype).contiguous()
    right = {"kind": FITS[name].kind, "version": 1}
    about = draw(st.just(right) | JSON | st.builds(lambda x: {**right, "kind": x}, JSON))
    metadata = draw(st.sampled_from([json.dumps(about), "{", "[" * 5000, ""]))
    return save(tensors, {"hook-or-patch": metadata})


@kinds
@given(data=st.data())
@fuzzed
def test_files_that_hold_something_else(name: str, data: Any, tmp_path: Path) -> None:
    read(name, data.draw(contents(name)), tmp_path)


_GATE = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight")
PUBLISHED = {
    "gates": [f"layers.{i}.{x}" for i, x in product(range(LAYERS), (*_GATE, "k_base", "b"))],
    "curves": ["rates"],
    "filters": ["q_filters"],
    "stats": ["query_mean", "query_cov"],
    "head scores": ["scores"],
    "regressor": [f"layers.{i}.{x}" for i in range(LAYERS) for x in ("0.weight", "weight", "bias")],
    "adapter": ["embeddings", "down.q_proj", "up.q_proj"],
}


@kinds
@given(data=st.data())
@fuzzed
def test_files_in_the_names_of_what_is_published(name: str, data: Any, tmp_path: Path) -> None:
    names = st.lists(st.sampled_from(PUBLISHED[name]) | st.text(max_size=10), unique=True)
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    tensors = {called: torch.rand(data.draw(shapes)) for called in data.draw(names)}
    read(name, save(tensors), tmp_path)


@given(text=st.text(alphabet="0123456789.einf-\t \nx", max_size=40) | st.text(max_size=20))
@fuzzed
def test_tables_of_head_scores(text: str, tmp_path: Path) -> None:
    read("head scores", text.encode("utf-8", "surrogatepass"), tmp_path, ".tsv")


def npy(array: Any) -> bytes:
    file = BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@given(data=st.binary(max_size=100).map(lambda tail: b"\x93NUMPY\x01\x00" + tail) | st.binary())
@fuzzed
def test_arrays_of_any_bytes(data: bytes, tmp_path: Path) -> None:
    assert read("curves", data, tmp_path, ".npy") is None


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((99, 2, 2), dtype=np.int64),
        np.zeros((99, 2, 2), dtype=np.complex64),
        np.zeros((99, 2, 2), dtype="U3"),
        np.array([{}, None], dtype=object),
        np.full((99, 2, 2), np.nan),
        np.full((99, 2, 2), 1.5),
        np.zeros((98, 2, 2)),
        np.zeros((99, 0, 2)),
        np.zeros(()),
    ],
    ids=str,
)
def test_arrays_that_are_no_curves(array: Any, tmp_path: Path) -> None:
    assert read("curves", npy(array), tmp_path, ".npy") is None


def test_arrays_as_they_are_published_are_curves(tmp_path: Path) -> None:
    curves = FITS["curves"].tensors["rates"]
    for array in (curves.numpy(), curves.double().numpy(), np.asfortranarray(curves.numpy())):
        found = read("curves", npy(array), tmp_path, ".npy")
        assert found is not None
        torch.testing.assert_close(found.tensors["rates"].float(), curves)


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was run",)


@kinds
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npy", ".tsv"])
def test_no_pickle_is_run(name: str, suffix: str, tmp_path: Path) -> None:
    assert read(name, pickle.dumps(Bomb()), tmp_path, suffix) is None
    assert read(name, npy(np.array([Bomb()], dtype=object)), tmp_path, suffix) is None


LORA = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2}
_LAYER = "base_model.model.q_proj.lora_"


@pytest.mark.parametrize("about", ["[", "[]", "{}", '{"peft_type": "LORA"}', "1", "[" * 5000])
def test_configurations_of_peft_that_are_none(about: str, tmp_path: Path) -> None:
    assert adapter_of(about, {_LAYER + "B.weight": torch.rand(WIDTH, RANK)}, tmp_path) is None


@pytest.mark.parametrize(
    "tensors",
    [
        {_LAYER + "A.weight": torch.rand(RANK, WIDTH)},
        {_LAYER + "A.weight": torch.rand(3), _LAYER + "B.weight": torch.rand(())},
        {_LAYER + "A.weight": torch.rand(2, WIDTH), _LAYER + "B.weight": torch.rand(WIDTH, 3)},
        {"restore_embeddings": torch.full((8, WIDTH), float("nan"))},
        {"restore_embeddings": torch.rand(8)},
        {"other_embeddings": torch.rand(8, WIDTH)},
    ],
)
def test_adapters_of_peft_that_are_none(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    assert adapter_of(json.dumps(LORA), tensors, tmp_path) is None


def test_an_adapter_of_peft(tmp_path: Path) -> None:
    down, up = torch.rand(RANK, WIDTH), torch.rand(WIDTH, RANK)
    tensors = {_LAYER + "A.weight": down, _LAYER + "B.weight": up}
    adapter = adapter_of(json.dumps(LORA), tensors, tmp_path)
    assert adapter is not None
    assert torch.equal(adapter.down["q_proj"], down)
    assert torch.equal(adapter.up["q_proj"], up * (2 / RANK))


def adapter_of(about: str, tensors: dict[str, Tensor], folder: Path) -> RestoreAdapter | None:
    """What a folder as PEFT saves it holds; None if it was refused, which has to be in one line."""
    embeddings = {name: x for name, x in tensors.items() if "embeddings" in name}
    others = {name: x for name, x in tensors.items() if name not in embeddings}
    embeddings = embeddings or {"restore_embeddings": torch.rand(8, WIDTH)}
    (folder / "adapter_config.json").write_text(about)
    (folder / "restore_embeddings.safetensors").write_bytes(save(embeddings))
    (folder / "adapter_model.safetensors").write_bytes(save(others))
    adapter, refusal = _tried(lambda: RestoreAdapter.load(folder))
    assert adapter is not None or isinstance(refusal, CalibrationError)
    return adapter  # type: ignore[no-any-return]
