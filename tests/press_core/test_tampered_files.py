"""Files that somebody has tampered with, of caches and of what was learned: read, or refused."""

import json
import pickle
import re
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save, save_file
from transformers import DynamicCache

from press_core import (
    CacheFileError,
    PressError,
    about_cache,
    cache_nbytes,
    kept_lengths,
    load_cache,
    save_cache,
)
from press_core.files.files import METADATA, _seal
from press_core.learned.calibration import Calibration, CalibrationError, check_fits
from press_core.learned.restorekv import RestoreAdapter
from tests.press_core.drawn import FITS, JSON, PUBLISHED, TABLES, WIDTH, site
from tests.press_core.test_saving import Evil, cache_of, header_of, model_of
from tests.support import PROFILE, token_ids

CACHES = TABLES["tampered_caches"]
KINDS = st.sampled_from([*CACHES, *FITS])
WORDS = st.sampled_from(TABLES["words"])
NUMBERS = st.sampled_from([-1, 0, 1, 2**31, 2**40, 2**63, 10**400, 0.5])
DTYPES = [getattr(torch, name) for name in TABLES["dtypes"]]
VALUES = (-(2**31), -1, 0, 0.5, 1, 7, 2**31 - 1, float("nan"), float("inf"), 1e38)

N_EXAMPLES = {"long": 20_000}.get(PROFILE, 200)
FUZZED = settings(max_examples=N_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
SOME = settings(FUZZED, max_examples=N_EXAMPLES // 4)
RANK = 3


@lru_cache
def whole_file(name):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        if name in FITS:
            return FITS[name].save(path).read_bytes()
        family = CACHES[name]
        save_cache(cache_of(name, family), path, model_of(family), input_ids=token_ids(2, 4))
        return path.read_bytes()


def read(name, content, suffix=".safetensors"):
    """What a file holds; None if it was refused, in one line. The folder is left as it was."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"a{suffix}"
        path.write_bytes(content)
        if name in CACHES:
            refused(lambda: about_cache(path), CacheFileError)
            found = refused(lambda: load_cache(path, model_of(CACHES[name])), CacheFileError)
        else:
            found = refused(lambda: type(FITS[name]).load(path), CalibrationError)
        assert path.read_bytes() == content
        assert [file.name for file in path.parent.iterdir()] == [path.name]
    if isinstance(found, DynamicCache):
        assert len(kept_lengths(found)) == len(found.layers)
        assert cache_nbytes(found) < 2**21
    if isinstance(found, Calibration):
        assert isinstance(found, type(FITS[name]))
        assert all(x.is_floating_point() and not x.isnan().any() for x in found.tensors.values())
        repr(found)
        refused(lambda: check_fits(found, site()), PressError)
    return found


def refused(call, kind):
    """What `call` returns, or None if it refuses, with an error of a `kind`."""
    try:
        return call()
    except kind as error:
        said = str(error)
    assert said
    assert len(said.splitlines()) == 1
    assert len(said) < 1000
    return None


@FUZZED
@given(KINDS, st.data())
def test_bytes_that_were_changed(name, data):
    content = bytearray(whole_file(name))
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(content), 2 * header) - 1))
        end = place + data.draw(st.integers(0, 40))
        content[place:end] = data.draw(st.binary(max_size=40))
    ends = st.sampled_from([len(content), len(content) // 2, 7, header])
    read(name, bytes(content[: data.draw(ends | st.integers(0, len(content)))]))


def test_a_bit_of_a_key_that_was_changed():
    content = bytearray(whole_file("SnapKVPress"))
    content[-1] ^= 1
    assert read("SnapKVPress", bytes(content)) is None


@FUZZED
@given(KINDS, st.data())
def test_headers_and_tensors_that_were_changed(name, data):
    """The file is sound; what it says, or what it holds, is not."""
    content = whole_file(name)
    tensors = load(content)
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    header = json.loads(metadata[METADATA])
    for _ in range(data.draw(st.integers(1, 3))):
        how = data.draw(st.sampled_from(["header", "tensor", "tensor", "gone", "renamed"]))
        if how == "header" or not tensors:
            header = changed(data, header)
            continue
        key = data.draw(st.sampled_from(sorted(tensors)))
        tensor = tensors.pop(key)
        if how == "tensor":
            tensors[key] = other_tensor(data, tensor)
        elif how == "renamed":
            tensors[data.draw(st.text(max_size=8))] = tensor
    said = st.sampled_from(["{", "[" * 5000, ""])
    about = json.dumps(header) if data.draw(st.integers(0, 19)) else data.draw(said)
    read(name, save(tensors, {METADATA: about}))


@SOME
@given(st.sampled_from([*FITS]), st.data())
def test_files_in_the_names_of_what_is_published(name, data):
    known = [*PUBLISHED.get(name, FITS[name].tensors)]
    names = st.lists(st.sampled_from(known) | st.text(max_size=10), unique=True)
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    read(name, save({called: torch.rand(data.draw(shapes)) for called in data.draw(names)}))


def changed(data, node):
    """JSON with something else somewhere in it, more often deep inside."""
    if isinstance(node, (dict, list)) and node and data.draw(st.integers(0, 9)):
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from([*keys]))
        node = node.copy()
        if data.draw(st.integers(0, 9)) == 0:
            del node[key]
        else:
            node[key] = changed(data, node[key])
        return node
    return data.draw(JSON | WORDS | NUMBERS)


def other_tensor(data, tensor):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=5))
    dtype, value = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(VALUES))
    if data.draw(st.booleans()):
        shape = [data.draw(st.just(n) | st.integers(0, 3)) for n in tensor.shape]
    if data.draw(st.booleans()):
        dtype = tensor.dtype
    return torch.full(shape, value).to(dtype)


@pytest.mark.parametrize("name", ["SnapKVPress", "AdaKVPress", "ThinKPress"])
@pytest.mark.parametrize("field", ["n_seen", "n_slots", "positions"])
def test_counts_and_positions_are_bounded_whoever_has_sealed_them(tmp_path, name, field):
    path = tmp_path / "a"
    path.write_bytes(whole_file(name))
    tensors, header = load_file(path), header_of(path)
    own = {key: x for key, x in tensors.items() if key.startswith("cache.")}
    description = json.dumps(header["caches"]["is"])
    if field == "positions":
        keys = re.findall(r'"(?:positions|slots)": {"tensor": "([^"]+)"', description)
        own |= {key: own[key].new_full(own[key].shape, 2**20) for key in keys}
    else:
        changed_there = re.sub(rf'"{field}": \d+', f'"{field}": {2**40}', description)
        assert changed_there != description
        header["caches"]["is"] = json.loads(changed_there)
    header["caches"]["seal"] = _seal(header["caches"]["is"], own)
    path.unlink()
    save_file(tensors | own, path, {METADATA: json.dumps(header)})
    with pytest.raises(CacheFileError, match="beyond"):
        load_cache(path, model_of(CACHES[name]))


# ---- other files of what was learned -------------------------------------------------------------


@given(text=st.text(alphabet="0123456789.einf-\t \nx", max_size=40) | st.text(max_size=20))
@SOME
def test_tables_of_head_scores(text):
    read("head scores", text.encode("utf-8", "surrogatepass"), ".tsv")


def npy(array):
    file = BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@given(data=st.binary(max_size=100).map(lambda tail: b"\x93NUMPY\x01\x00" + tail) | st.binary())
@SOME
def test_arrays_of_any_bytes(data):
    assert read("curves", data, ".npy") is None


@pytest.mark.parametrize("array", TABLES["no_curves"])
def test_arrays_that_are_no_curves(array):
    assert read("curves", npy(eval(array, vars(np))), ".npy") is None


def test_arrays_as_they_are_published_are_curves():
    curves = FITS["curves"].rates.float()
    for array in (curves.numpy(), curves.double().numpy(), np.asfortranarray(curves.numpy())):
        found = read("curves", npy(array), ".npy")
        torch.testing.assert_close(found.tensors["rates"].float(), curves)


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npy", ".tsv"])
def test_no_pickle_is_run(name, suffix):
    assert read(name, pickle.dumps(Evil()), suffix) is None
    assert read(name, npy(np.array([Evil()], dtype=object)), suffix) is None


LORA = json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 2})
A, B = (f"base_model.model.q_proj.lora_{name}.weight" for name in "AB")


@pytest.mark.parametrize(("about", "tensors"), TABLES["no_adapters"])
def test_adapters_of_peft_that_are_none(about, tensors, tmp_path):
    about, tensors = (eval(text, vars(torch) | globals()) for text in (about, tensors))
    assert adapter_of(about, tensors, tmp_path) is None


def test_an_adapter_of_peft(tmp_path):
    down, up = torch.rand(RANK, WIDTH), torch.rand(WIDTH, RANK)
    adapter = adapter_of(LORA, {A: down, B: up}, tmp_path)
    assert torch.equal(adapter.down["q_proj"], down)
    assert torch.equal(adapter.up["q_proj"], up * (2 / RANK))


def adapter_of(about, tensors, folder):
    """What a folder as PEFT saves it holds; None if it was refused, which has to be in one line."""
    embeddings = {name: x for name, x in tensors.items() if "embeddings" in name}
    others = {name: x for name, x in tensors.items() if name not in embeddings}
    embeddings = embeddings or {"restore_embeddings": torch.rand(8, WIDTH)}
    (folder / "adapter_config.json").write_text(about)
    (folder / "restore_embeddings.safetensors").write_bytes(save(embeddings))
    (folder / "adapter_model.safetensors").write_bytes(save(others))
    return refused(lambda: RestoreAdapter.load(folder), CalibrationError)  # type: ignore[no-any-return]
