"""Compress once, ask tomorrow: a cache from a file answers as the one that was saved."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

import hooks_impl
import patch_impl
from attention_patch import headwise
from press_core import about_cache, cache_nbytes, kept_lengths, load_cache, save_cache
from press_core.cache.pruned import ReadingNeeds
from press_core.errors import UnsupportedModelError
from tests.decoders import tiny_decoder
from tests.press_core.test_saving import cache_of
from tests.presses import TABLES
from tests.support import PACKAGES, build, context_for, example_for, filled, left_padded, token_ids
from tests.twins import same

QUESTION = token_ids(1, 5, seed=3)


def answers(model, cache, helper, rows=1, **arguments):
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


def needs(layer):
    return getattr(layer, "needs", ReadingNeeds.NOTHING)


def assert_kept(cache, loaded):
    """Both caches say the same of themselves."""
    for layer, other in zip(cache.layers, loaded.layers, strict=True):
        assert type(other) is type(layer)
        for name in ("n_seen", "device", "dtype"):
            assert getattr(other, name, None) == getattr(layer, name, None)
        if hasattr(layer, "get_seq_length"):
            assert other.get_seq_length() == layer.get_seq_length()
        # A press that prunes in the middle of a forward may have asked for more than is needed.
        assert needs(other) in needs(layer)
        positions = getattr(layer, "positions", None)
        assert positions is None or torch.equal(positions, other.positions)
    # transformers keeps what has left a window in memory for a while.
    slides = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
    assert slides or cache_nbytes(loaded) == cache_nbytes(cache)
    assert cache_nbytes(loaded) <= cache_nbytes(cache)
    assert all(map(torch.equal, kept_lengths(cache), kept_lengths(loaded)))


def read_again(model, cache, path, *helpers):
    """What is read says the same as what was written, and answers as it does."""
    loaded = load_cache(save_cache(cache, path, model), model)
    assert_as_good(model, cache, loaded, *helpers)
    return loaded


def assert_as_good(model, cache, loaded, *helpers, **arguments):
    assert_kept(cache, loaded)
    for helper in helpers:
        expected = answers(model, cache, helper, **arguments)
        assert same(answers(model, loaded, helper, **arguments), expected)


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
        path, again = tmp_path / package.__name__, example_for(package, name, 0.5, model)
        loaded = read_again(model, cache, path, headwise(model), again(model))
        assert list(map(needs, loaded.layers)) == list(map(needs, cache.layers))
        files.append(path.read_bytes())
    assert files[0] == files[1]


# ---- every kind of layer -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fields", "kind", "has"), TABLES["saved"])
def test_rows_of_different_lengths_that_were_decoded(package, name, fields, kind, has, tmp_path):
    """Padding, what came after the pruning, sinks, scores to be judged late, channels."""
    model = build("llama")
    cache = cache_of(name, model=model, package=package, **fields)
    mask = left_padded(2, 41, [0, 7])[1]
    press = replace(example_for(package, name, 0.5, model), **fields)
    assert all(type(layer).__name__ == kind and getattr(layer, has) for layer in cache.layers)
    path = save_cache(cache, tmp_path / "cache.safetensors", model, attention_mask=mask)
    loaded, given = load_cache(path, model), about_cache(path).inputs["attention_mask"]
    helpers = headwise(model), press(model)
    assert_as_good(model, cache, loaded, *helpers, rows=2, attention_mask=given)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "gpt2"])
def test_sliding_layers_and_caches_without_a_configuration(package, family, tmp_path):
    model = build(family, attn_implementation="eager")
    caches = [DynamicCache(config=model.config), DynamicCache()]
    for i, cache in enumerate(caches):
        filled(model, package.KnormPress(0.5), token_ids(1, 40), cache)
        read_again(model, cache, tmp_path / str(i), package.KnormPress(0.5)(model))


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1", "gemma3n_text", "gemma4_text"])
def test_layers_that_presses_leave_alone(name, tmp_path):
    """Convolutions, linear states, layers that share another's cache."""
    model = tiny_decoder(name)
    try:
        press = patch_impl.KeyDiffPress(0.5)(model)
        press.open()
    except UnsupportedModelError as error:
        assert transformers.__version__ < "5.3"
        pytest.skip(f"{name} needs a newer transformers: {error}")
    cache = model(token_ids(1, 40), use_cache=True).past_key_values
    press.remove()
    read_again(model, cache, tmp_path / "cache.safetensors", headwise(model))


def test_an_encoder_decoder(tmp_path):
    model = tiny_decoder("bart (seq2seq)")
    context, ids = token_ids(1, 12), token_ids(1, 40, seed=1)
    with patch_impl.KnormPress(0.5)(model):
        output = model(input_ids=context, decoder_input_ids=ids, use_cache=True)
    cache = output.past_key_values
    assert type(cache) is EncoderDecoderCache
    loaded = load_cache(save_cache(cache, tmp_path / "cache.safetensors", model), model)
    assert loaded.is_updated == cache.is_updated
    assert_kept(cache.self_attention_cache, loaded.self_attention_cache)
    given = {"encoder_outputs": (output.encoder_last_hidden_state,)}
    given["decoder_input_ids"] = QUESTION[:, :3]
    found = [model(past_key_values=asked, **given).logits for asked in (cache, loaded)]
    assert torch.equal(*found)


def test_where_it_is_put(tmp_path):
    """Every tensor is on the device that was asked for; the layer believes to be there, too."""
    model = build("gemma2", attn_implementation="eager")
    for name in ("KeyRerotationPress", "AdaKVPress"):
        press = example_for(hooks_impl, name, 0.5, model)
        path = save_cache(filled(model, press, token_ids(1, 40)), tmp_path / name, model)
        for layer in load_cache(path, model, device="meta").layers:
            assert layer.device == torch.device("meta")
            assert layer.keys.device == layer.values.device == torch.device("meta")
            for known in (getattr(layer, "positions", None), getattr(layer, "slots", None)):
                assert known is None or known.device == torch.device("meta")


def test_another_attention_implementation(tmp_path):
    """What a forward needs follows from the model that reads: only sdpa steps without a mask."""
    press = example_for(hooks_impl, "PyramidKVPress", 0.5, build("llama"))
    sdpa, eager = build("llama"), build("llama", attn_implementation="eager")
    cache = filled(sdpa, press, token_ids(1, 40))
    path = save_cache(cache, tmp_path / "cache.safetensors", sdpa)
    made_there = filled(eager, press, token_ids(1, 40))
    found = list(map(needs, load_cache(path, eager).layers))
    assert found == list(map(needs, made_there.layers))
    assert found != list(map(needs, cache.layers))


def test_a_loaded_cache_is_its_own(tmp_path, model):
    """It outlives its file, and does not change it."""
    cache = filled(model, hooks_impl.KnormPress(0.5), token_ids(1, 40))
    path = save_cache(cache, tmp_path / "cache.safetensors", model)
    content, expected = path.read_bytes(), answers(model, cache, headwise(model))
    loaded, other = load_cache(path, model), load_cache(path, model)
    for layer in other.layers:
        layer.keys.zero_()
    assert path.read_bytes() == content
    path.write_bytes(b"")
    assert same(answers(model, loaded, headwise(model)), expected)
