"""Files of caches: what is refused, in one line, and what is never written over."""

from __future__ import annotations

import copy
import json
import os
import pickle
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache

import hooks_impl
from press_core import (
    CacheFileError,
    PressError,
    UnsupportedCacheError,
    UnsupportedModelError,
    about_cache,
    cache_nbytes,
    kept_lengths,
    load_cache,
    save_cache,
)
from press_core.cache.memory import Key, Memory
from press_core.files import files, saving
from press_core.files.identity import identity, name_of
from press_core.files.tensors import METADATA
from press_core.learned.qfilter import QFilters
from tests.support import build, example_for, left_padded, token_ids


@lru_cache
def model_of(family: str = "llama", seed: int = 0) -> Any:
    return build(family, attn_implementation="eager", seed=seed)


def cache_of(name: str = "SnapKVPress", family: str = "llama") -> Any:
    """A cache of an uneven batch that a press has pruned, and that a token was decoded with."""
    model, cache = model_of(family), DynamicCache(config=model_of(family).config)
    ids, mask, positions = left_padded(2, 40, [0, 7])
    press = example_for(hooks_impl, name, 0.5, model)
    if name == "ThinKPress":
        press.free_memory = True
    with torch.no_grad(), press(model):
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.int64)), dim=1)
        places = mask.sum(dim=-1, keepdim=True) - 1
        more = {"attention_mask": mask, "position_ids": places}
        model(token_ids(2, 1), past_key_values=cache, **more)
    return cache


@pytest.fixture
def path(tmp_path) -> Path:
    return save_cache(cache_of(), tmp_path / "cache.safetensors", model_of())


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()[METADATA])


def rewrite(path: Path, **changed: Any) -> Path:
    """The same file with another header."""
    header = header_of(path) | changed
    save_file(load_file(path), path, {METADATA: json.dumps(header)})
    return path


def refused(path: Path, match: str, **options: Any) -> None:
    with pytest.raises(CacheFileError, match=match) as error:
        load_cache(path, options.pop("model", model_of()), **options)
    assert "\n" not in str(error.value)


# ---- the header ----------------------------------------------------------------------------------


def test_what_a_file_says(tmp_path):
    model, ids = model_of(), token_ids(1, 40)
    cache = DynamicCache(config=model.config)
    press = hooks_impl.KnormPress(0.75)
    with torch.no_grad(), press(model):
        model(ids, past_key_values=cache)
    path = save_cache(
        cache, tmp_path / "a.safetensors", model, press=press, input_ids=ids, notes={"tail": "!"}
    )
    about = about_cache(path)
    assert about.press == "KnormPress(compression_ratio=0.75)"
    assert (about.n_seen, about.evicted, about.notes) == (40, 0.75, {"tail": "!"})
    assert list(about.inputs) == ["input_ids"]
    assert torch.equal(about.inputs["input_ids"], ids)
    assert about.made_with["transformers"] == transformers.__version__
    assert about.made_with["torch"] == torch.__version__
    assert set(about.made_with) == {"hook-or-patch", "transformers", "torch"}


def test_padding_does_not_count_as_evicted(tmp_path):
    """20 of 40 and 16 of 33 tokens are left, and then there came one more."""
    path = save_cache(cache_of(), tmp_path / "a.safetensors", model_of())
    assert about_cache(path).evicted == pytest.approx(1 - (21 + 17) / (41 + 34))


@pytest.mark.parametrize("name", ["SnapKVPress", "AdaKVPress"])
def test_equal_caches_make_equal_files(name, tmp_path):
    files = [save_cache(cache_of(name), tmp_path / f"{i}", model_of()).read_bytes() for i in "ab"]
    assert files[0] == files[1]


def test_other_releases_of_transformers(path):
    versions = header_of(path)["made_with"]
    rewrite(path, made_with=versions | {"torch": "2.6.0", "hook-or-patch": "0.0.1"})
    load_cache(path, model_of())  # which compute the same
    rewrite(path, made_with=versions | {"transformers": "5.9.0"})
    refused(
        path, rf"written with transformers 5\.9\.0, and {transformers.__version__}.* any_version"
    )
    loaded = load_cache(path, model_of(), any_version=True)
    for layer, expected in zip(loaded.layers, cache_of().layers, strict=True):
        assert torch.equal(layer.keys, expected.keys)


def test_another_version_of_the_format(path):
    rewrite(path, version=1)
    refused(path, "has version 1 of the format; this release reads 2")
    with pytest.raises(CacheFileError, match="version 1"):
        about_cache(path)


# ---- other models --------------------------------------------------------------------------------


def test_other_weights(path):
    refused(path, "of another model .*: it has the same configuration, and other weights",
            model=build("llama", attn_implementation="eager", seed=1))  # fmt: skip


def test_a_single_other_weight(path):
    other = copy.deepcopy(model_of())
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight[0, 0] += 1
    refused(path, "other weights or adapters", model=other)


def test_adapters_that_are_off_or_on(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(model_of()), config)
    with torch.no_grad(), hooks_impl.KnormPress(0.5)(model):
        cache = model(token_ids(1, 40), use_cache=True).past_key_values
    path = save_cache(cache, tmp_path / "a", model)
    load_cache(path, model)
    with model.disable_adapter():
        refused(path, "other weights or adapters", model=model)
    refused(path, "other weights or adapters")


def test_another_configuration(path):
    refused(path, "config_class is LlamaConfig there and Qwen2Config here", model=build("qwen2"))
    refused(path, "num_hidden_layers is 2 there and 3 here", model=build("llama", num_layers=3))
    other = copy.deepcopy(model_of())
    other.config.rms_norm_eps = 1e-3
    refused(path, "rms_norm_eps is 1e-06 there and 0.001 here", model=other)


def test_another_dtype(path):
    other = build("llama", dtype=torch.bfloat16, attn_implementation="eager")
    refused(path, "dtype is float32 there and bfloat16 here", model=other)


def test_the_same_model_by_other_ways(path, tmp_path):
    """Its body alone, another attention implementation, and what was written and read again."""
    model_of().save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sdpa")
    for model in (again, again.model):
        assert identity(model) == identity(model_of())
        load_cache(path, model)


def test_names_of_models():
    def named(name: str) -> Any:
        return SimpleNamespace(config=SimpleNamespace(name_or_path=name))

    assert name_of(named("owner/model")) == "owner/model"
    assert name_of(named("/home/somebody/models/llama")) == "llama"
    assert name_of(named("")) == ""


def test_a_model_without_a_configuration(path):
    with pytest.raises(UnsupportedModelError, match="Linear has no configuration"):
        load_cache(path, torch.nn.Linear(2, 2))


def test_weights_that_are_not_here(path):
    with pytest.raises(UnsupportedModelError, match="has no data"):
        load_cache(path, copy.deepcopy(model_of()).to("meta"))


def test_a_part_of_the_heads(monkeypatch, tmp_path):
    sites = saving.attention_sites(model_of())
    shared = [replace(site, ranks=replace(site.ranks, size=2)) for site in sites]
    monkeypatch.setattr(saving, "attention_sites", lambda _: shared)
    with pytest.raises(UnsupportedModelError, match="tensor parallelism"):
        save_cache(cache_of(), tmp_path / "cache.safetensors", model_of())
    assert not list(tmp_path.iterdir())


# ---- caches that cannot be kept ------------------------------------------------------------------


def not_saved(cache: Any, folder: Path, match: str) -> None:
    with pytest.raises(UnsupportedCacheError, match=match):
        save_cache(cache, folder / "cache.safetensors", model_of())
    assert not list(folder.iterdir())


def test_a_static_cache(tmp_path):
    not_saved(StaticCache(config=model_of().config, max_cache_len=8), tmp_path, "a StaticCache")


def test_a_quantized_cache(tmp_path):
    pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
    model = model_of()
    cache = QuantizedCache("quanto", model.config, q_group_size=16)
    with torch.no_grad(), hooks_impl.KnormPress(0.5)(model):
        model(token_ids(1, 40), past_key_values=cache)
    not_saved(cache, tmp_path, "cannot save a QuantizedCache")
    plain = DynamicCache(config=model.config)
    plain.layers = cache.layers
    not_saved(plain, tmp_path, "cannot save a Quanto.*in the format")


def test_caches_in_the_middle_of_something(tmp_path):
    cache = cache_of()
    cache.layers[1].is_unusable = True
    not_saved(cache, tmp_path, "abandoned in the middle of a forward")
    cache = cache_of()
    cache.layers[0].memories[Key()] = Memory(in_prefill=True)
    not_saved(cache, tmp_path, "whose prefill is under way")
    for name in ("AdaKVPress", "ThinKPress"):
        cache = cache_of(name)
        cache.layers[0].reset()
        not_saved(cache, tmp_path, "abandoned in the middle of a forward, reset")


def test_a_layer_that_holds_an_object(tmp_path):
    cache = DynamicCache(config=model_of().config)
    cache.layers[0].helper = object()
    not_saved(cache, tmp_path, "its helper is a object")


def test_what_a_scope_remembers_is_not_kept(tmp_path):
    """Scopes of another process have the same numbers."""
    cache = cache_of()
    cache.layers[0].memories[Key()] = Memory(7)
    loaded = load_cache(save_cache(cache, tmp_path / "a", model_of()), model_of())
    assert not loaded.layers[0].memories


def test_an_empty_cache(tmp_path):
    was_reset = cache_of()
    was_reset.reset()
    empty = (DynamicCache(config=model_of().config), DynamicCache(), was_reset)
    for i, cache in enumerate(empty):
        loaded = load_cache(save_cache(cache, tmp_path / str(i), model_of()), model_of())
        assert loaded.get_seq_length() == 0
        assert len(loaded.layers) == len(cache.layers)
        with torch.no_grad():
            model_of()(token_ids(1, 5), past_key_values=loaded)
        assert loaded.get_seq_length() == 5


# ---- files that are there already ----------------------------------------------------------------


def test_a_file_is_never_written_over_unasked(path):
    content = path.read_bytes()
    with pytest.raises(CacheFileError, match="is there already"):
        save_cache(cache_of("AdaKVPress"), path, model_of())
    assert path.read_bytes() == content
    save_cache(cache_of("AdaKVPress"), path, model_of(), overwrite=True)
    assert path.read_bytes() != content
    rewrite(path, version=7)  # of an earlier release, say
    save_cache(cache_of(), path, model_of(), overwrite=True)
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_what_is_no_cache_is_never_written_over(tmp_path, path):
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(path)
    content = path.read_bytes()
    for target in (foreign, folder, link, tmp_path / "nowhere" / "cache.safetensors"):
        for overwrite in (False, True):
            with pytest.raises(CacheFileError):
                save_cache(cache_of(), target, model_of(), overwrite=overwrite)
    assert foreign.read_text() == "mine"
    assert link.is_symlink()
    assert path.read_bytes() == content
    assert not list(folder.iterdir())


def test_a_file_that_comes_meanwhile(monkeypatch, tmp_path):
    path = tmp_path / "cache.safetensors"
    save = files.save_file

    def slow(*args: Any) -> None:
        save(*args)
        path.write_text("mine")

    monkeypatch.setattr(files, "save_file", slow)
    with pytest.raises(CacheFileError, match=r"cannot be written: .*File exists"):
        save_cache(cache_of(), path, model_of())
    assert path.read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_disk_that_is_full_leaves_nothing(monkeypatch, tmp_path):
    def full(tensors: Any, part: Path, _: Any) -> None:
        part.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(CacheFileError, match="No space left"):
        save_cache(cache_of(), tmp_path / "cache.safetensors", model_of())
    assert not list(tmp_path.iterdir())


def test_notes_that_are_no_json(tmp_path):
    with pytest.raises(CacheFileError, match="not JSON serializable"):
        save_cache(cache_of(), tmp_path / "a", model_of(), notes={"press": object()})
    assert not list(tmp_path.iterdir())


# ---- files that are something else ---------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return pytest.fail, ("code of the file was run",)


def test_foreign_files(tmp_path, path):
    foreign = tmp_path / "foreign"
    refused(foreign, "there is no file")
    refused(tmp_path, "there is no file")
    for content in (b"", b"{}", pickle.dumps(Evil()), path.read_bytes()[:-9], b"\xff" * 99):
        foreign.write_bytes(content)
        refused(foreign, "is no compressed cache")
    torch.save(Evil(), foreign)
    refused(foreign, "is no compressed cache")
    save_file({"weight": torch.ones(2)}, foreign)
    refused(foreign, "is no compressed cache: nothing in it says so")
    save_file({}, foreign, {METADATA: json.dumps({"kind": "filters", "version": 1})})
    refused(foreign, "is no compressed cache: nothing in it says so")
    with pytest.raises(PressError, match="of the format; this release reads"):
        QFilters.load(path)


def test_a_window_that_is_not_the_models(tmp_path):
    path = save_cache(cache_of(family="gemma2"), tmp_path / "a", model_of("gemma2"))
    text = json.dumps(header_of(path)).replace('["sliding_window", 16]', '["sliding_window", 17]')
    save_file(load_file(path), path, {METADATA: text})
    refused(path, "has no sliding_window such as 17", model=model_of("gemma2"))


def test_attributes_that_layers_do_not_have(tmp_path):
    path = save_cache(cache_of(), tmp_path / "a", model_of())
    sound = json.dumps(header_of(path))
    for name in ("update", "__class__", "anything"):
        text = sound.replace('["is_initialized", true]', f'["{name}", true]')
        save_file(load_file(path), path, {METADATA: text})
        refused(path, f"has no {name} such as True")


# ---- and files that somebody has tampered with ---------------------------------------------------

KINDS = {
    "SnapKVPress": "llama", "AdaKVPress": "llama", "DMSPress": "llama", "ThinKPress": "llama",
    "KeyRerotationPress": "gemma2",
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["tensor", "of", "dtype", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)
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
        shape = list(tensor.shape)
        if shape and data.draw(st.booleans()):
            shape[data.draw(st.integers(0, len(shape) - 1))] = data.draw(st.integers(0, 3))
    if data.draw(st.booleans()):
        dtype = tensor.dtype
    if not dtype.is_floating_point and dtype != torch.bool:
        value = max(min(value, torch.iinfo(dtype).max), torch.iinfo(dtype).min)
    return torch.full(shape, value, dtype=dtype)
