"""`kept_positions` against the values that the model handed to the cache, token by token.

Every value that a cache holds is one that it was given. Which one says where the token stood: that
takes no word of what layers know of themselves.
"""

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

from attention_patch import headwise
from press_core import (
    UnsupportedCacheError,
    UnsupportedModelError,
    kept_lengths,
    kept_positions,
    load_cache,
    prefill,
    save_cache,
)
from press_core.cache.caches import cache_nbytes, known
from tests.decoders import tiny_decoder
from tests.presses import PIPELINE_PRESSES
from tests.support import Latest, build, example_for, filled, left_padded

LENGTH = 56
IDS = torch.randperm(125, generator=torch.Generator().manual_seed(0)) + 3  # no token comes twice
CONTEXT, LATER = IDS[None, :LENGTH], IDS[None, LENGTH : LENGTH + 9]


def watched(cache):
    """A cache, and by layer the values that it is given from now on, in their order."""
    given, update = {}, cache.update

    def watch(keys, values, layer_idx, *args, **kwargs):
        given.setdefault(layer_idx, []).append(values.clone())
        return update(keys, values, layer_idx, *args, **kwargs)

    cache.update = watch
    return cache, given


def assert_right(cache, given, exact=True):
    """What each head holds is what came at the positions that are said of it."""
    told, lengths = kept_positions(cache), kept_lengths(cache)
    assert len(told) == len(lengths) == len(cache.layers)
    for index, layer in enumerate(cache.layers):
        came = torch.cat(given[index], dim=2)
        slides = getattr(layer, "is_sliding", False)
        held = layer.values if slides else known(cache, index).states()[1]
        assert told[index].dtype == torch.int64
        positions = told[index].expand(*held.shape[:2], -1)
        assert positions.shape == held.shape[:3]
        assert torch.equal((positions >= 0).sum(dim=-1), lengths[index])
        for row, head in torch.cartesian_prod(*map(torch.arange, held.shape[:2])).tolist():
            of_head = positions[row, head][lengths[index][row, head].neg() :]
            assert bool((of_head.diff() > 0).all())  # and no -1 among them
            values = held[row, head, held.shape[2] - len(of_head) :]
            if exact:
                assert torch.equal(values, came[row, head, of_head])
            else:
                assert torch.equal(torch.cdist(values, came[row, head]).argmin(-1), of_head)


def n_evicted(cache):
    """Positions that some head has lost, over all layers."""
    seen = int(getattr(cache.layers[0], "n_seen", 0) or cache.get_seq_length())
    return sum(int((seen - lengths).clamp(min=0).sum()) for lengths in kept_lengths(cache))


def fill(model, cache, mask=None, ids=CONTEXT):
    """A context, three tokens at once and six one by one."""
    later, more = LATER.expand(len(ids), -1), {}
    for new in (ids, *later.split([3, *[1] * 6], dim=1)):
        if mask is not None:
            mask = mask if new is ids else torch.cat((mask, torch.ones_like(new)), dim=1)
            positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)[:, -new.shape[1] :]
            more = {"attention_mask": mask, "position_ids": positions}
        model(new, past_key_values=cache, **more)


@pytest.mark.parametrize("padding", [[0], [0, 7, 19]], ids=["alone", "padded"])
@pytest.mark.parametrize("name", [name for name in PIPELINE_PRESSES if name != "none"])
def test_every_kind_of_layer(package, name, padding):
    model = build("llama")
    ids, mask, _ = left_padded(len(padding), LENGTH, padding)
    press = PIPELINE_PRESSES[name](package)
    if name == "kvzip":  # which asks for a tokenizer, or for prompts in token ids
        press = example_for(package, "KVzipPress", 0.5, model)
    cache, given = watched(DynamicCache(config=model.config))
    with press(model):
        fill(model, cache, mask if len(padding) > 1 else None, ids)
    assert_right(cache, given)
    assert n_evicted(cache) > 0 or name == "channels"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_untouched(family):
    model = build(family, attn_implementation="eager")
    cache, given = watched(DynamicCache(config=model.config))
    fill(model, cache)
    assert_right(cache, given)
    for index, positions in enumerate(kept_positions(cache)):
        first = LENGTH + 9 - (15 if cache.layers[index].is_sliding else LENGTH + 9)
        assert positions[0, 0].tolist() == list(range(first, LENGTH + 9))


def quantized(config):
    pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
    return QuantizedCache("quanto", config, nbits=4, residual_length=6, q_group_size=16)


CACHES = {
    "beside layers that slide": lambda config: DynamicCache(config=config),
    "quantized": quantized,
    "static": lambda config: StaticCache(config=config, max_cache_len=80),
}


@pytest.mark.parametrize("name", ["none", "snapkv", "adakv", "decoding"])
@pytest.mark.parametrize("kind", CACHES)
def test_other_caches(package, kind, name):
    if (kind, name) == ("quantized", "adakv"):
        return  # refused: test_quantized.py
    model = build("llama")
    if kind == "beside layers that slide":
        model = build("gemma2", attn_implementation="eager")
    cache, given = watched(CACHES[kind](model.config))
    with (PIPELINE_PRESSES[name](package) or package.KnormPress(0.0))(model):
        fill(model, cache)
    assert_right(cache, given, exact=kind != "quantized")


@pytest.mark.parametrize("name", ["snapkv", "adakv", "rerotated", "dms"])
def test_what_caches_do_meanwhile(package, name, tmp_path):
    """Chunks, tokens taken back, rows selected, a file."""
    model = build("llama")
    cache, given = watched(DynamicCache(config=model.config))
    with PIPELINE_PRESSES[name](package)(model):
        prefill(model, CONTEXT, cache, chunk_size=20)
    with headwise(model):
        model(LATER[:, :5], past_key_values=cache)
        cache.crop(-2)
        given = {i: [torch.cat(values, dim=2)[:, :, :-2]] for i, values in given.items()}
        assert_right(cache, given)
        cache.batch_repeat_interleave(2)
        given = {i: [values[0].expand(2, -1, -1, -1)] for i, values in given.items()}
        assert_right(cache, given)
    del cache.update  # a cache that is watched is none that can be kept
    loaded = load_cache(save_cache(cache, tmp_path / "cache.safetensors", model), model)
    assert_right(loaded, given)


def test_an_encoder_decoder_tells_of_its_decoder(package):
    model = tiny_decoder("bart (seq2seq)")
    with package.SnapKVPress(0.5, window_size=8)(model):
        cache = model(CONTEXT[:, :12], decoder_input_ids=CONTEXT).past_key_values
    assert {layer.keys.shape[2] for layer in cache.cross_attention_cache.layers} == {12}
    positions = kept_positions(cache)
    assert [x.shape[-1] for x in positions] == [LENGTH // 2] * len(cache.self_attention_cache)
    assert all(map(torch.equal, positions, kept_positions(cache.self_attention_cache)))
    with pytest.raises(UnsupportedModelError, match="without the encoder"):
        example_for(package, "KVzipPress", 0.5, build("llama")).register(model)


def test_layers_that_hold_nothing():
    for cache in (DynamicCache(), DynamicCache(config=build("llama").config)):
        assert all(x.shape == (1, 1, 0) for x in kept_positions(cache))
    for ask in (kept_lengths, kept_positions, cache_nbytes):
        with pytest.raises(UnsupportedCacheError, match="a NoneType is no cache"):
            ask(None)


def test_a_press_that_does_not_say_what_it_kept():
    cache = filled(build("llama"), Latest(), CONTEXT)
    assert kept_lengths(cache)[0].tolist() == [[8, 8]]
    with pytest.raises(UnsupportedCacheError, match=r"layer 0 .*Eviction\.keep"):
        kept_positions(cache)
