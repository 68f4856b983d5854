"""Whatever a file says that was learned: it is read, or refused in one line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from io import BytesIO
from itertools import count
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
from press_core.learned.calibration import Calibration, CalibrationError, check_fits
from press_core.learned.restorekv import RestoreAdapter
from tests.press_core.drawn import FITS, JSON, PUBLISHED, WIDTH, site

RANK = 3
kinds = pytest.mark.parametrize("name", FITS)
fuzzed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_numbers = count()

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
    _tried(lambda: check_fits(fitted, site()))
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


@kinds
@given(data=st.data())
@fuzzed
def test_files_in_the_names_of_what_is_published(name: str, data: Any, tmp_path: Path) -> None:
    known = [*PUBLISHED.get(name, FITS[name].tensors)]
    names = st.lists(st.sampled_from(known) | st.text(max_size=10), unique=True)
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
    curves = FITS["curves"].rates.float()
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


_UP = {_LAYER + "B.weight": torch.rand(WIDTH, RANK)}


@pytest.mark.parametrize(
    ("about", "tensors"),
    [
        *((about, _UP) for about in ("[", "[]", "{}", '{"peft_type": "LORA"}', "1", "[" * 5000)),
        *(
            (json.dumps(LORA), tensors)
            for tensors in (
                {_LAYER + "A.weight": torch.rand(RANK, WIDTH)},
                {_LAYER + "A.weight": torch.rand(3), _LAYER + "B.weight": torch.rand(())},
                {_LAYER + "A.weight": torch.rand(2, WIDTH), _LAYER + "B.weight": torch.rand(9, 3)},
                {"restore_embeddings": torch.full((8, WIDTH), float("nan"))},
                {"restore_embeddings": torch.rand(8)},
                {"other_embeddings": torch.rand(8, WIDTH)},
            )
        ),
    ],
)
def test_adapters_of_peft_that_are_none(
    about: str, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    assert adapter_of(about, tensors, tmp_path) is None


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
