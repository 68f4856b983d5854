"""Files of caches: what is refused, in one line, and what is never written over."""

import copy
import json
import pickle
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import transformers
from safetensors.torch import load_file, safe_open, save_file
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache

import hooks_impl
from press_core import (
    CacheFileError,
    PressError,
    UnsupportedCacheError,
    UnsupportedModelError,
    about_cache,
    load_cache,
    save_cache,
)
from press_core.cache.memory import Key, Memory
from press_core.files import files, saving
from press_core.files.files import METADATA
from press_core.files.saving import identity
from press_core.learned.measured import QFilters
from tests.press_core.drawn import TABLES
from tests.support import build, example_for, filled, in_parts, left_padded, token_ids


@lru_cache
def model_of(family="llama", seed=0):
    return build(family, attn_implementation="eager", seed=seed)


def cache_of(name="SnapKVPress", family="llama", model=None, package=hooks_impl, **fields):
    """A cache of an uneven batch that a press has pruned, and that a token was decoded with."""
    model = model or model_of(family)
    fields |= {"free_memory": True} if name == "ThinKPress" else {}
    press = replace(example_for(package, name, 0.5, model), **fields)
    return in_parts(model, press, left_padded(2, 41, [0, 7]), [0, 40, 41])[0]


@pytest.fixture
def path(tmp_path):
    return save_cache(cache_of(), tmp_path / "cache.safetensors", model_of())


def header_of(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()[METADATA])


def rewrite(path, **changed):
    """The same file with another header."""
    save_file(load_file(path), path, {METADATA: json.dumps(header_of(path) | changed)})
    return path


def refused(path, match, **options):
    with pytest.raises(CacheFileError, match=match) as error:
        load_cache(path, options.pop("model", model_of()), **options)
    assert "\n" not in str(error.value)


# ---- the header ----------------------------------------------------------------------------------


def test_what_a_file_says(tmp_path):
    model, ids = model_of(), token_ids(1, 40)
    press = hooks_impl.KnormPress(0.75)
    cache = filled(model, press, ids)
    told = {"press": press, "input_ids": ids, "notes": {"tail": "!"}}
    path = save_cache(cache, tmp_path / "a.safetensors", model, **told)
    about = about_cache(path)
    assert about.press == "KnormPress(compression_ratio=0.75)"
    assert (about.n_seen, about.evicted, about.notes) == (40, 0.75, {"tail": "!"})
    assert list(about.inputs) == ["input_ids"]
    assert torch.equal(about.inputs["input_ids"], ids)
    assert about.made_with["transformers"] == transformers.__version__
    assert about.made_with["torch"] == torch.__version__
    assert set(about.made_with) == {"hook-or-patch", "transformers", "torch"}


def test_padding_does_not_count_as_evicted(path):
    """20 of 40 and 16 of 33 tokens are left, and then there came one more."""
    assert about_cache(path).evicted == pytest.approx(1 - (21 + 17) / (41 + 34))


def test_other_releases_of_transformers(path):
    versions = header_of(path)["made_with"]
    rewrite(path, made_with=versions | {"torch": "2.6.0", "hook-or-patch": "0.0.1"})
    load_cache(path, model_of())  # which compute the same
    rewrite(path, made_with=versions | {"transformers": "5.9.0"})
    refused(path, rf"5\.9\.0.*{transformers.__version__}.*any_version")
    loaded = load_cache(path, model_of(), any_version=True)
    for layer, expected in zip(loaded.layers, cache_of().layers, strict=True):
        assert torch.equal(layer.keys, expected.keys)


def test_releases_without_an_attribute_of_layers(tmp_path):
    model, cache = model_of("gemma2"), cache_of(family="gemma2")
    del cache.layers[0]._sliding_window_tensor
    loaded = load_cache(save_cache(cache, tmp_path / "a", model), model)
    assert hasattr(loaded.layers[0], "_sliding_window_tensor")


def test_another_version_of_the_format(path):
    rewrite(path, version=1)
    refused(path, "version 1 ")
    with pytest.raises(CacheFileError, match="version 1"):
        about_cache(path)


# ---- other models --------------------------------------------------------------------------------


def test_other_models(path):
    weight, setting = (copy.deepcopy(model_of()) for _ in range(2))
    weight.model.layers[1].self_attn.v_proj.weight[0, 0] += 1
    setting.config.rms_norm_eps = 1e-3
    for model, match in (
        (model_of(seed=1), "same configuration.* other"),
        (weight, "other weights or adapters"),
        (setting, "rms_norm_eps.* 1e-06 .* 0.001 "),
        (build("qwen2"), "LlamaConfig.* Qwen2Config"),
        (build("llama", num_layers=3), "num_hidden_layers.* 2 .* 3 "),
        (copy.deepcopy(model_of()).bfloat16(), "float32.* bfloat16"),
    ):
        refused(path, match, model=model)
    for model, match in (
        (torch.nn.Linear(2, 2), "Linear has no configuration"),
        (copy.deepcopy(model_of()).to("meta"), "has no data"),
    ):
        with pytest.raises(UnsupportedModelError, match=match):
            load_cache(path, model)


def test_adapters_that_are_off_or_on(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(model_of()), config)
    cache = filled(model, hooks_impl.KnormPress(0.5), token_ids(1, 40))
    path = save_cache(cache, tmp_path / "a", model)
    load_cache(path, model)
    with model.disable_adapter():
        refused(path, "other weights or adapters", model=model)
    refused(path, "other weights or adapters")


def test_the_same_model_by_other_ways(path, tmp_path):
    """Its body alone, other attention, another class of a module, what was written and read."""
    model_of().save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sdpa")
    again.model.norm.__class__ = type("Norm", (type(again.model.norm),), {})
    for model in (again, again.model):
        assert identity(model) == identity(model_of())
        load_cache(path, model)


def test_a_part_of_the_heads(monkeypatch, tmp_path):
    sites = saving.attention_sites(model_of())
    shared = [replace(site, ranks=replace(site.ranks, size=2)) for site in sites]
    monkeypatch.setattr(saving, "attention_sites", lambda _: shared)
    with pytest.raises(UnsupportedModelError, match="tensor parallelism"):
        save_cache(cache_of(), tmp_path / "cache.safetensors", model_of())
    assert not list(tmp_path.iterdir())


# ---- caches that cannot be kept ------------------------------------------------------------------


def not_saved(cache, folder, match):
    with pytest.raises(UnsupportedCacheError, match=match):
        save_cache(cache, folder / "cache.safetensors", model_of())
    assert not list(folder.iterdir())


def test_a_quantized_cache(tmp_path):
    pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
    model = model_of()
    cache = QuantizedCache("quanto", model.config, q_group_size=16)
    filled(model, hooks_impl.KnormPress(0.5), token_ids(1, 40), cache)
    not_saved(cache, tmp_path, "a QuantizedCache")
    plain = DynamicCache(config=model.config)
    plain.layers = cache.layers
    not_saved(plain, tmp_path, "Quanto.*Layer")


def test_caches_that_cannot_be_kept(tmp_path):
    torn, begun, other, key = cache_of(), cache_of(), DynamicCache(), Key()
    static = StaticCache(config=model_of().config, max_cache_len=8)
    not_saved(static, tmp_path, "a StaticCache")
    torn.layers[1].is_unusable = True
    not_saved(torn, tmp_path, "abandoned")
    begun.layers[0].remember(key, Memory(in_prefill=True))
    not_saved(begun, tmp_path, "whose prefill is under way")
    for name in ("AdaKVPress", "ThinKPress"):
        was_reset = cache_of(name)
        was_reset.layers[0].reset()
        not_saved(was_reset, tmp_path, "abandoned.*reset")
    other.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    other.layers[0].helper = object()
    not_saved(other, tmp_path, "cannot save a object")


def test_what_a_scope_remembers_is_not_kept(tmp_path):
    """Scopes of another process have the same numbers."""
    cache, key = cache_of(), Key()
    cache.layers[0].remember(key, Memory(7))
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
        model_of()(token_ids(1, 5), past_key_values=loaded)
        assert loaded.get_seq_length() == 5


# ---- files that are there already ----------------------------------------------------------------


def test_a_file_is_never_written_over_unasked(path):
    content = path.read_bytes()
    with pytest.raises(CacheFileError, match=r"is there already.*save_cache\(overwrite"):
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


def test_a_file_that_comes_meanwhile_or_a_disk_that_is_full(monkeypatch, tmp_path):
    path, save = tmp_path / "cache.safetensors", files.save_file

    def slow(*args):
        save(*args)
        path.write_text("mine")

    def full(tensors, part, _):
        part.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    for writing, match in ((full, "No space left"), (slow, "File exists")):
        assert not list(tmp_path.iterdir())
        monkeypatch.setattr(files, "save_file", writing)
        with pytest.raises(CacheFileError, match=match):
            save_cache(cache_of(), path, model_of())
    assert path.read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(("name", "given", "match"), TABLES["not_saved"])
def test_notes_that_are_no_json_and_inputs_that_are_no_tensors(name, given, match, tmp_path):
    with pytest.raises(CacheFileError, match=match):
        save_cache(cache_of(), tmp_path / "a", model_of(), **{name: eval(given)})
    assert not list(tmp_path.iterdir())


# ---- files that are something else ---------------------------------------------------------------


class Evil:
    def __reduce__(self):
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
    refused(foreign, "is no compressed cache: no")
    save_file({}, foreign, {METADATA: json.dumps({"kind": "filters", "version": 1})})
    refused(foreign, "is no compressed cache: it holds filters")
    with pytest.raises(PressError, match="holds 'compressed cache', not Q-filters"):
        QFilters.load(path)


@pytest.mark.parametrize(("family", "there", "instead"), TABLES["attributes"])
def test_attributes_that_layers_do_not_have(family, there, instead, tmp_path):
    path = save_cache(cache_of(family=family), tmp_path / "a", model_of(family))
    text = json.dumps(header_of(path))
    save_file(load_file(path), path, {METADATA: text.replace(there, instead)})
    refused(path, "not as it was written", model=model_of(family))
