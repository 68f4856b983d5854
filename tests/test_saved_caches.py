"""Compress once, ask tomorrow: a cache from a file answers as the one that was saved."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

import hooks_impl
import patch_impl
from attention_patch import headwise
from experiments.loading import load_model
from experiments.questions.architectures.decoders import build as build_tiny
from experiments.questions.architectures.decoders import decoders
from press_core import (
    PrunedLayer,
    RaggedLayer,
    UnsupportedModelError,
    about_cache,
    cache_nbytes,
    kept_lengths,
    load_cache,
    save_cache,
)
from press_core.cache.channels import ChannelPrunedLayer
from press_core.cache.pruned import ReadingNeeds
from tests.support import PACKAGES, build, context_for, example_for, filled, left_padded, token_ids

QUESTION = token_ids(1, 5, seed=3)


def answers(model: Any, cache: Any, helper: Any, rows: int = 1, **arguments: Any) -> list[Tensor]:
    """Logits of a question of several tokens, and of two tokens after it; `cache` is not changed.

    Args:
        arguments: of the forward of each token after the context, `(rows, n)` of all of them.
    """
    cache = copy.deepcopy(cache)
    logits, seen, mask = [], 0, arguments.get("attention_mask")
    with helper:
        for n in (3, 1, 1):
            ids = QUESTION[:, seen : seen + n].expand(rows, -1)
            more = {}
            if mask is not None:
                mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
                positions = (mask.cumsum(dim=-1) - 1)[:, -n:]
                more = {"attention_mask": mask, "position_ids": positions}
            logits.append(model(ids, past_key_values=cache, **more).logits)
            seen += n
    return logits


def needs(layer: Any) -> ReadingNeeds:
    return getattr(layer, "needs", ReadingNeeds.NOTHING)


def held(cache: Any) -> list[Any]:
    """All that layers say about what they hold."""
    return [
        (
            type(layer).__name__,
            layer.get_seq_length() if hasattr(layer, "get_seq_length") else None,
            getattr(layer, "n_seen", None),
            getattr(layer, "device", None),
            getattr(layer, "dtype", None),
        )
        for layer in cache.layers
    ]


def assert_kept(cache: Any, loaded: Any) -> None:
    """Both caches say the same of themselves."""
    assert held(loaded) == held(cache)
    if any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        # transformers keeps what has left a window in memory for a while.
        assert cache_nbytes(loaded) <= cache_nbytes(cache)
    else:
        assert cache_nbytes(loaded) == cache_nbytes(cache)
    for one, other in zip(kept_lengths(cache), kept_lengths(loaded), strict=True):
        assert torch.equal(one, other)
    for layer, other in zip(cache.layers, loaded.layers, strict=True):
        # A press that prunes in the middle of a forward may have asked for more than is needed.
        assert needs(other) in needs(layer)
        positions = getattr(layer, "positions", None)
        if positions is not None:
            assert torch.equal(positions, other.positions)


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    for logits, expected in zip(one, other, strict=True):
        assert torch.equal(logits, expected)


# ---- every press ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in sorted(hooks_impl.PRESSES)),
        ("AdaKVPress", torch.bfloat16),
    ],
)
def test_every_press(name, dtype, tmp_path):
    """Both mechanisms write the same bytes, and what is read answers as what was written."""
    model = build("llama", dtype=dtype)
    files = []
    for package in PACKAGES:
        press = example_for(package, name, 0.5, model)
        cache = filled(model, press, context_for(name, 48))
        path = save_cache(cache, tmp_path / f"{package.__name__}.safetensors", model)
        loaded = load_cache(path, model)
        assert_kept(cache, loaded)
        assert list(map(needs, loaded.layers)) == list(map(needs, cache.layers))
        again = example_for(package, name, 0.5, model)
        for helper in (headwise(model), again(model)):
            expected = answers(model, cache, helper)
            assert_same(answers(model, loaded, helper), expected)
        files.append(path.read_bytes())
    assert files[0] == files[1]


# ---- every kind of layer -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "kind", "has"),
    [
        ("SnapKVPress", {}, PrunedLayer, "kept"),
        ("AdaKVPress", {}, RaggedLayer, "kept"),
        ("DMSPress", {}, RaggedLayer, "carried"),
        ("KeyRerotationPress", {}, PrunedLayer, "rerotation"),
        ("PyramidKVPress", {}, PrunedLayer, "kept"),
        ("StreamingLLMDecodingPress", {"rerotate": True}, PrunedLayer, "carried"),
        ("ThinKPress", {"free_memory": True}, ChannelPrunedLayer, "kept"),
    ],
)
def test_rows_of_different_lengths_that_were_decoded(package, name, fields, kind, has, tmp_path):
    """Padding, what came after the pruning, sinks, scores to be judged late, channels."""
    model = build("llama")
    ids, mask, positions = left_padded(3, 40, [0, 7, 19])
    press = example_for(package, name, 0.5, model)
    for field, value in fields.items():
        setattr(press, field, value)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        for token in QUESTION[0, 2:4]:
            mask = torch.cat((mask, torch.ones(3, 1, dtype=torch.int64)), dim=1)
            place = mask.sum(dim=-1, keepdim=True) - 1
            model(
                token.expand(3, 1), attention_mask=mask, position_ids=place, past_key_values=cache
            )
    assert all(type(layer) is kind and getattr(layer, has) for layer in cache.layers)
    path = save_cache(cache, tmp_path / "cache.safetensors", model, attention_mask=mask)
    loaded, given = load_cache(path, model), about_cache(path).inputs["attention_mask"]
    assert_kept(cache, loaded)
    arguments = {"rows": 3, "attention_mask": given}
    for helper in (headwise(model), press(model)):
        expected = answers(model, cache, helper, **arguments)
        assert_same(answers(model, loaded, helper, **arguments), expected)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "gpt2"])
def test_sliding_layers_and_caches_without_a_configuration(package, family, tmp_path):
    model = build(family, attn_implementation="eager")
    caches = [DynamicCache(config=model.config), DynamicCache()]
    for i, cache in enumerate(caches):
        with package.KnormPress(0.5)(model):
            model(token_ids(1, 40), past_key_values=cache)
        path = save_cache(cache, tmp_path / f"{i}.safetensors", model)
        loaded = load_cache(path, model)
        assert_kept(cache, loaded)
        expected = answers(model, cache, package.KnormPress(0.5)(model))
        assert_same(answers(model, loaded, package.KnormPress(0.5)(model)), expected)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1", "gemma3n_text", "gemma4_text"])
def test_layers_that_presses_leave_alone(name, tmp_path):
    """Convolutions, linear states, layers that share another's cache."""
    if name not in decoders():
        pytest.skip(f"the installed transformers has no {name}")
    model = build_tiny(decoders()[name])
    try:
        press = patch_impl.KeyDiffPress(0.5)(model)
        press.open()
    except UnsupportedModelError as error:
        assert transformers.__version__ < "5.3"
        pytest.skip(f"{name} needs a newer transformers: {error}")
    with torch.no_grad():
        cache = model(token_ids(1, 40), use_cache=True).past_key_values
    press.remove()
    loaded = load_cache(save_cache(cache, tmp_path / "cache.safetensors", model), model)
    assert_kept(cache, loaded)
    expected = answers(model, cache, headwise(model))
    assert_same(answers(model, loaded, headwise(model)), expected)


def test_an_encoder_decoder(tmp_path):
    model = build_tiny(decoders()["bart (seq2seq)"])
    context, ids = token_ids(1, 12), token_ids(1, 40, seed=1)
    with patch_impl.KnormPress(0.5)(model):
        output = model(input_ids=context, decoder_input_ids=ids, use_cache=True)
    cache = output.past_key_values
    assert type(cache) is EncoderDecoderCache
    loaded = load_cache(save_cache(cache, tmp_path / "cache.safetensors", model), model)
    assert loaded.is_updated == cache.is_updated
    assert_kept(cache.self_attention_cache, loaded.self_attention_cache)
    encoded = (output.encoder_last_hidden_state,)
    found = []
    for held in (cache, loaded):
        with torch.no_grad():
            logits = model(
                encoder_outputs=encoded, decoder_input_ids=QUESTION[:, :3], past_key_values=held
            ).logits
        found.append([logits])
    assert_same(*found)


def test_where_it_is_put(tmp_path):
    """Every tensor is on the device that was asked for; the layer believes to be there, too."""
    model = build("gemma2", attn_implementation="eager")
    for name in ("KeyRerotationPress", "AdaKVPress"):
        press = example_for(hooks_impl, name, 0.5, model)
        path = tmp_path / f"{name}.safetensors"
        save_cache(filled(model, press, token_ids(1, 40)), path, model)
        for layer in load_cache(path, model, device="meta").layers:
            assert layer.device == torch.device("meta")
            assert layer.keys.device == layer.values.device == torch.device("meta")
            for known in (getattr(layer, "positions", None), getattr(layer, "slots", None)):
                assert known is None or known.device == torch.device("meta")


def test_another_attention_implementation(tmp_path):
    """What a forward needs follows from the model that reads: only sdpa steps without a mask."""
    press = example_for(hooks_impl, "PyramidKVPress", 0.5, build("llama"))
    path = tmp_path / "cache.safetensors"
    sdpa, eager = build("llama"), build("llama", attn_implementation="eager")
    cache = filled(sdpa, press, token_ids(1, 40))
    save_cache(cache, path, sdpa)
    made_there = filled(eager, press, token_ids(1, 40))
    found = list(map(needs, load_cache(path, eager).layers))
    assert found == list(map(needs, made_there.layers))
    assert found != list(map(needs, cache.layers))


def test_a_loaded_cache_is_its_own(tmp_path):
    """It outlives its file, and does not change it."""
    model = build("llama")
    cache = filled(model, hooks_impl.KnormPress(0.5), token_ids(1, 40))
    path = save_cache(cache, tmp_path / "cache.safetensors", model)
    content, expected = path.read_bytes(), answers(model, cache, headwise(model))
    loaded, other = load_cache(path, model), load_cache(path, model)
    for layer in other.layers:
        layer.keys.zero_()
    assert path.read_bytes() == content
    path.write_bytes(b"")
    assert_same(answers(model, loaded, headwise(model)), expected)


# ---- another process -----------------------------------------------------------------------------

FRESH = """
import sys, torch
from attention_patch import headwise
from experiments.loading import load_model
from press_core import about_cache, load_cache
model, tokenizer = load_model("facts-llama")
question = tokenizer("? alice ? hector", add_special_tokens=False, return_tensors="pt").input_ids
for path in sys.argv[1:]:
    with headwise(model):
        cache = load_cache(path, model)
        logits = model(question, past_key_values=cache).logits[0]
        ids = torch.cat((about_cache(path).inputs["input_ids"], question), dim=1)
        output = model.generate(
            ids, past_key_values=load_cache(path, model), max_new_tokens=4, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )
    torch.save(torch.cat([logits, *output.logits]), path + ".pt")
"""


def test_a_fresh_process(tmp_path):
    model, tokenizer = load_model("facts-llama")
    text = "river alice tea garden over hector lamp morning " + "meadow march light " * 20
    ids = tokenizer(text, return_tensors="pt").input_ids
    question = tokenizer("? alice ? hector", add_special_tokens=False, return_tensors="pt")
    paths, caches = [], []
    for name in ("SnapKVPress", "AdaKVPress"):
        caches.append(filled(model, example_for(hooks_impl, name, 0.5, model), ids))
        path = tmp_path / f"{name}.safetensors"
        paths.append(str(save_cache(caches[-1], path, model, input_ids=ids)))
    script = tmp_path / "fresh.py"
    script.write_text(FRESH)
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, str(script), *paths],
        env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for path, cache in zip(paths, caches, strict=True):
        found = torch.load(path + ".pt")
        with headwise(model):
            logits = model(question.input_ids, past_key_values=copy.deepcopy(cache)).logits[0]
            output = model.generate(
                torch.cat((ids, question.input_ids), dim=1), past_key_values=cache,
                max_new_tokens=4, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        assert torch.equal(found, torch.cat([logits, *output.logits]))
