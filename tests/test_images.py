"""Contexts with an image in them: positions in three dimensions, tokens that see later ones.

That each kind of press keeps what it should is in `tests/experiments/test_architectures.py`.
"""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from experiments.questions.architectures.decoders import image_inputs, with_image
from press_core import Needs, ScopeError, UnsupportedInputError, UnsupportedModelError, probe
from press_core.attention import received_attention
from press_core.cache.masks import bidirectional_mask
from press_core.files import saving
from press_core.probe import attention_sites
from press_core.tiles import NUMBERS
from tests.decoders import tiny_decoder
from tests.support import GREEDY, both, token_ids

N = 24


def tiny(name):
    return tiny_decoder(f"{name} (image)")


def in_3d():
    """A model whose images have positions in three dimensions."""
    model = tiny("qwen3_vl")
    if any("rope" in site.refusals for site in attention_sites(model)):
        pytest.skip("the installed transformers hands on no cosines and sines of this model")
    return model


def context(model):
    return with_image(model, 5 + torch.arange(N)[None])


def run(model, ids, cache):
    return model(input_ids=ids, past_key_values=cache, **image_inputs(model, ids)).logits


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_keys_of_images_move_to_their_places_and_text_goes_on_there(package, ratio):
    """Hooks and patches alike, in the same scope; without one nobody may read such a cache."""
    model = in_3d()
    press = package.KeyRerotationPress(package.KnormPress(ratio))
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=N + 5)):
        with press(model):
            run(model, context(model), cache)
            run(model, token_ids(1, 3) % 90, cache)
        expected = [*range(round(N * (1 - ratio)) + 3)]
        for layer in cache.layers:
            assert layer.all_rotary_positions()[0, 0].tolist() == expected
        with pytest.raises(ScopeError, match="positions"):
            run(model, token_ids(1, 1) % 90, cache)


@both
def test_an_image_behind_keys_that_have_moved_is_refused(package):
    model = in_3d()
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=3 * N)):
        with package.KeyRerotationPress(package.KnormPress(0.5))(model):
            run(model, 5 + torch.arange(N)[None], cache)
            held = [layer.get_seq_length() for layer in cache.layers]
            model.model.rope_deltas = None
            with pytest.raises(UnsupportedInputError, match=r"image came .* behind keys"):
                run(model, context(model), cache)
        assert [layer.get_seq_length() for layer in cache.layers] == held


@both
def test_what_comes_after_an_image_at_the_end_is_not_guessed(package):
    model = in_3d()
    ids = context(model)
    last = int((ids == model.config.image_token_id).nonzero()[-1, 1]) + 1
    press = package.ExpectedAttentionPress(0.5, n_sink=2)
    with press(model), pytest.raises(UnsupportedInputError, match="let text follow"):
        run(model, ids[:, :last], DynamicCache())
    with press(model):
        run(model, ids, DynamicCache())


@both
def test_presses_that_move_keys_of_earlier_forwards_are_refused(package):
    model = in_3d()
    with pytest.raises(UnsupportedModelError, match="three dimensions"):
        package.StreamingLLMDecodingPress(16, rerotate=True).register(model)
    package.StreamingLLMDecodingPress(16).register(model).remove()


def test_decoding_presses_may_ask_for_positions_that_come(package):
    model, cache = in_3d(), DynamicCache()
    base = package.ExpectedAttentionPress(n_sink=2, n_future_positions=4)
    with package.DecodingPress(base, compression_interval=2, target_size=12)(model):
        run(model, context(model), cache)
        for i in range(4):
            run(model, token_ids(1, 1, seed=i) % 90, cache)
    assert [layer.keys.shape[2] for layer in cache.layers] == [12] * len(cache.layers)


@pytest.mark.parametrize("name", ["qwen3_vl", "glm4v"])
def test_a_probe_leaves_what_a_model_has_noted_of_its_images(name):
    model = tiny(name)
    probe._known.clear()
    run(model, context(model), DynamicCache())
    noted = model.model.rope_deltas
    assert int(noted) < 0
    assert not any(site.refusals for site in attention_sites(model))
    assert model.model.rope_deltas is noted


def test_masks_of_full_attention_may_be_left_out(package):
    """As under sdpa, for a single token that sees everything."""
    model, found = tiny("gemma3"), []
    for form in ("eager", "sdpa"):
        model.set_attn_implementation(form)
        with package.StreamingLLMDecodingPress(16)(model):
            found.append(model.generate(context(model), max_new_tokens=3, do_sample=False))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_generate_with_an_image(package, name, tmp_path):
    model = tiny(name)
    ids = context(model)
    options = {**image_inputs(model, ids), **GREEDY, "max_new_tokens": 6}
    plain = model.generate(ids, **options)
    with package.KnormPress(0.0)(model):
        assert torch.equal(model.generate(ids, **options), plain)
    cache = DynamicCache(config=model.config)
    with package.KnormPress(0.5)(model):
        model.generate(ids, past_key_values=cache, **options)
    assert {layer.keys.shape[2] for layer in cache.layers} == {N // 2 + 5}
    if name == "qwen3_vl":  # how positions go on after the image is not in the cache
        with pytest.raises(saving.UnsupportedCacheError, match="rope_deltas"):
            saving.save_cache(cache, tmp_path / "image", model)


# ---- tokens that see later ones ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["paligemma", "gemma3"])
@pytest.mark.parametrize("block", [1, 5, 100])
@pytest.mark.usefixtures("not_compiled")
def test_attention_of_images_is_that_of_the_model(package, name, block, monkeypatch):
    """Weights that are computed again, in blocks, are those that eager attention returns."""
    monkeypatch.setitem(NUMBERS, "cpu", block * 4 * N)
    model, received = tiny(name), []

    def read(call):
        received.append(received_attention(call))
        if (weights := call.attentions) is not None:
            means = weights.sum(dim=2) / (weights > 0).sum(dim=2)  # of those that see a key
            of_groups = means.unflatten(1, (call.keys.shape[1], -1)).mean(dim=2)
            score = package.ObservedAttentionPress(0.5).score(call)
            torch.testing.assert_close(score, of_groups, rtol=0, atol=1e-5)
        chosen = call.select(torch.arange(call.length).expand(call.keys.shape[:3]))
        torch.testing.assert_close(received_attention(chosen), received[-1], rtol=0, atol=1e-5)

    reading = package.BasePress.collector(read, reads=Needs.QUERIES)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with reading(model):
            run(model, context(model), DynamicCache())
    torch.testing.assert_close(*torch.stack(received).chunk(2), rtol=0, atol=1e-5)
    model.set_attn_implementation("flex_attention")
    with reading(model), pytest.raises(UnsupportedInputError, match="under flex attention"):
        run(model, context(model), DynamicCache())


@pytest.mark.parametrize("form", ["bool", "float"])
def test_later_tokens_are_read_from_the_mask(form):
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[2:4, 2:4] = True
    if form == "float":
        mask = torch.zeros(6, 6).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert bidirectional_mask(mask[None, None], 6).nonzero().tolist() == [[0, 2, 3]]
    assert bidirectional_mask(mask[None, None, :2, :2], 2) is None
    assert bidirectional_mask(None, 6) is None


@both
def test_an_image_in_a_later_turn_is_refused_where_weights_are_read(package):
    model, cache = tiny("paligemma"), DynamicCache()
    press = package.EveryTurnPress(package.SnapKVPress(window_size=4), target_size=12)
    with press(model):
        run(model, 5 + torch.arange(N)[None], cache)
        mask = torch.zeros(1, 1, N, cache.layers[0].keys.shape[2] + N)  # each sees all
        with pytest.raises(UnsupportedInputError, match="see later ones"):
            model(token_ids(1, N) % 90, attention_mask=mask, past_key_values=cache)
