"""Files of caches that somebody has tampered with: read, or refused in one line."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from press_core import (
    CacheFileError,
    about_cache,
    cache_nbytes,
    kept_lengths,
    load_cache,
    save_cache,
)
from press_core.files.files import METADATA, _seal
from tests.press_core.drawn import JSON
from tests.press_core.test_saving import cache_of, header_of, model_of
from tests.support import token_ids

KINDS = {
    "SnapKVPress": "llama", "AdaKVPress": "llama", "DMSPress": "llama", "ThinKPress": "llama",
    "KeyRerotationPress": "gemma2",
}  # fmt: skip
WORDS = st.sampled_from(
    ["ragged", "pruned", "channels", "DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer",
     "float32", "int64", "tensor", "of", "self_attention_cache"]
)  # fmt: skip
NUMBERS = st.sampled_from([-1, 0, 1, 2**31, 2**40, 2**63, 10**400, 0.5])
TENSORS = st.tuples(
    st.lists(st.integers(0, 5), max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool]),
    st.sampled_from([-(2**31), -1, 0, 1, 7, 2**31 - 1]),
)

N_EXAMPLES = {"short": 100, "long": 20_000}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 400)
FUZZED = settings(
    max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@lru_cache
def whole_file(name: str) -> bytes:
    with TemporaryDirectory() as folder:
        family = KINDS[name]
        path = save_cache(cache_of(name, family), Path(folder) / "a", model_of(family),
                          input_ids=token_ids(2, 4))  # fmt: skip
        return path.read_bytes()


def load_or_refuse(path: Path, name: str) -> None:
    """What is read is a cache, or else an error of one line; the folder is as it was."""
    before = path.read_bytes()
    for read in (about_cache, lambda path: load_cache(path, model_of(KINDS[name]))):
        said, found = "", None
        try:
            found = read(path)
        except CacheFileError as error:
            said = str(error)
        assert "\n" not in said
        assert len(said) < 1000
        if isinstance(found, DynamicCache):
            assert len(kept_lengths(found)) == len(found.layers)
            assert cache_nbytes(found) < 2**21
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@FUZZED
@given(st.data())
def test_bytes_that_were_changed(data):
    name = data.draw(st.sampled_from(sorted(KINDS)))
    content = bytearray(whole_file(name))
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(content), 2 * header) - 1))
        end = place + data.draw(st.integers(0, 40))
        content[place:end] = data.draw(st.binary(max_size=40))
    content = content[: data.draw(st.sampled_from([len(content), len(content) // 2, 7, header]))]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(content)
        load_or_refuse(path, name)


@FUZZED
@given(st.data())
def test_headers_and_tensors_that_were_changed(data):
    """The file is sound; what it says, or what it holds, is not."""
    name = data.draw(st.sampled_from(sorted(KINDS)))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(whole_file(name))
        tensors, header = load_file(path), header_of(path)
        for _ in range(data.draw(st.integers(1, 3))):
            if data.draw(st.booleans()):
                header = changed(data, header)
            else:
                key = data.draw(st.sampled_from(sorted(tensors)))
                tensors[key] = other_tensor(data, tensors[key])
        path.unlink()
        save_file(tensors, path, {METADATA: json.dumps(header)})
        load_or_refuse(path, name)


def changed(data: Any, node: Any) -> Any:
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


def other_tensor(data: Any, tensor: Tensor) -> Tensor:
    shape, dtype, value = data.draw(TENSORS)
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
    if field == "positions":
        own |= {key: x.new_full(x.shape, 2**20) for key, x in own.items() if key.endswith(field)}
    else:
        description = json.dumps(header["caches"]["is"])
        changed_there = re.sub(rf'\["{field}", \d+\]', f'["{field}", {2**40}]', description)
        assert changed_there != description
        header["caches"]["is"] = json.loads(changed_there)
    header["caches"]["seal"] = _seal(header["caches"]["is"], own)
    path.unlink()
    save_file(tensors | own, path, {METADATA: json.dumps(header)})
    with pytest.raises(CacheFileError, match="beyond"):
        load_cache(path, model_of(KINDS[name]))
