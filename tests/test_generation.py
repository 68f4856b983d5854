"""A pruned cache continues as any other: positions, questions, generate, batches with padding."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import hooks_impl
import patch_impl
from press_core import PressError, ScopeError, UnsupportedInputError, cache_nbytes, kept_lengths
from tests.support import build, example_for, left_padded, token_ids

both = pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
implementations = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
LENGTH = 60
# Told a ratio, of which they evict as much in every layer.
EVEN = sorted(
    name
    for name, press in hooks_impl.PRESSES.items()
    if issubclass(press, hooks_impl.ScorerPress)
    and name not in ("PyramidKVPress", "FinchPress", "KVzipPress")
)


def make(implementation="sdpa", dtype=None, family="llama"):
    """In float64, so that a rounding error decides no top-k; eager's masks overflow there."""
    dtype = dtype or (torch.float32 if implementation == "eager" else torch.float64)
    return build(family, num_layers=2, attn_implementation=implementation, dtype=dtype)


def press_of(package):
    return package.SnapKVPress(0.5, window_size=8)


@both
@implementations
@torch.no_grad()
def test_positions_continue(package, implementation):
    """A question after a pruned context is rotated and masked as with explicit position ids."""
    model, question = make(implementation, torch.float32), token_ids(1, 7, seed=1)
    logits = []
    for position_ids in (None, torch.arange(LENGTH, LENGTH + 7)[None]):
        cache = DynamicCache(config=model.config)
        with press_of(package)(model):
            model(token_ids(1, LENGTH), past_key_values=cache)
        assert cache.get_seq_length() == LENGTH
        assert cache.layers[0].keys.shape[2] == LENGTH // 2
        logits.append(model(question, past_key_values=cache, position_ids=position_ids).logits)
    assert torch.equal(*logits)


@both
@torch.no_grad()
def test_a_question_at_once_is_the_question_token_by_token(package):
    model, question = make(), token_ids(1, 7, seed=1)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        with press_of(package)(model):
            model(token_ids(1, LENGTH), past_key_values=cache)
    at_once = model(question, past_key_values=caches[0]).logits
    one_by_one = [model(question[:, [i]], past_key_values=caches[1]).logits for i in range(7)]
    torch.testing.assert_close(at_once, torch.cat(one_by_one, dim=1), rtol=0, atol=1e-12)


@both
@torch.no_grad()
def test_nothing_evicted_changes_nothing(package):
    model = make(dtype=torch.float32)
    plain, pressed = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(token_ids(2, LENGTH), past_key_values=plain)
    with package.SnapKVPress(0.0)(model):
        model(token_ids(2, LENGTH), past_key_values=pressed)
    for one, other in zip(plain.layers, pressed.layers, strict=True):
        assert type(one) is type(other)
        assert torch.equal(one.keys, other.keys)


@both
@torch.no_grad()
def test_a_forward_without_cache_is_left_alone(package):
    model = make(dtype=torch.float32)
    reference = model(token_ids(1, LENGTH), use_cache=False).logits
    with press_of(package)(model):
        assert torch.equal(model(token_ids(1, LENGTH), use_cache=False).logits, reference)


@both
@torch.no_grad()
def test_only_a_prefill_is_pruned(package):
    model, cache = make(), DynamicCache(config=make().config)
    with press_of(package)(model):
        model(token_ids(1, LENGTH), past_key_values=cache)
        model(token_ids(1, 20), past_key_values=cache)
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [LENGTH // 2 + 20] * 2


@both
@implementations
def test_generate_inside_the_scope_is_generate_after_it(package, implementation):
    model, ids = make(implementation), token_ids(1, LENGTH)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with press_of(package)(model):
        inside = model.generate(ids, **options)
    cache = DynamicCache(config=model.config)
    with press_of(package)(model), torch.no_grad():
        logits = model(ids, past_key_values=cache).logits
    first = logits[:, -1:].argmax(dim=-1)
    after = model.generate(
        torch.cat((ids, first), dim=1), past_key_values=cache, **{**options, "max_new_tokens": 7}
    )
    assert torch.equal(inside, after)
    assert inside.shape == (1, LENGTH + 8)


@both
@implementations
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
def test_generate_in_a_padded_batch_is_generate_of_each_row(package, implementation, family):
    model = make(implementation, family=family)
    padding = [0, 11, 37]
    ids, mask, _ = left_padded(3, LENGTH, padding)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with press_of(package)(model):
        batch = model.generate(ids, attention_mask=mask, **options)
        for row, n in enumerate(padding):
            alone = model.generate(ids[row : row + 1, n:], **options)
            assert torch.equal(alone[0, -6:], batch[row, -6:])


@both
@implementations
@pytest.mark.parametrize("name", EVEN)
@torch.no_grad()
def test_rows_of_a_padded_batch_are_those_of_the_row_alone(package, implementation, name):
    model = make(implementation)
    press = example_for(package, name, 0.6, model)
    padding, question = [0, 13, 41], token_ids(3, 5, seed=1)
    ids, mask, positions = left_padded(3, LENGTH, padding)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        longer = torch.cat((mask, mask.new_ones(3, 5)), dim=1)
        asked = positions[:, -1:] + 1 + torch.arange(5)
        batch = model(
            question, attention_mask=longer, position_ids=asked, past_key_values=cache
        ).logits
        for row, n in enumerate(padding):
            alone = DynamicCache(config=model.config)
            model(ids[row : row + 1, n:], past_key_values=alone)
            budget = max(1, int((LENGTH - n) * (1 - 0.6)))
            for layer, single in zip(cache.layers, alone.layers, strict=True):
                assert single.kept.n_slots == budget
                kept = layer.positions[row, :, layer.kept.n_slots - budget :] - n
                assert torch.equal(kept, single.positions[0])
            logits = model(question[row : row + 1], past_key_values=alone).logits
            atol = 1e-5 if implementation == "eager" else 1e-10
            torch.testing.assert_close(batch[row], logits[0], rtol=0, atol=atol)
    assert kept_lengths(cache)[0][:, 0].tolist() == [24 + 5, 18 + 5, 7 + 5]


@both
@torch.no_grad()
def test_uneven_rows_need_a_scope(package):
    model = make(dtype=torch.float32)
    ids, mask, _ = left_padded(2, LENGTH, [0, 20])
    cache = DynamicCache(config=model.config)
    with press_of(package)(model):
        model(ids, attention_mask=mask, past_key_values=cache)
    longer = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
    with pytest.raises(ScopeError, match="keep the scope of the press open"):
        model(ids[:, :1], attention_mask=longer, past_key_values=cache)
    with package.KnormPress(0.5)(model):  # any scope gives the mask that such a cache needs
        model(ids[:, :1], attention_mask=longer, past_key_values=cache)


@both
@torch.no_grad()
def test_padding_on_the_right_is_refused(package):
    model = make(dtype=torch.float32)
    ids, mask = token_ids(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, -5:] = 0
    with press_of(package)(model), pytest.raises(UnsupportedInputError, match="row 1"):
        model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config))


@both
def test_beams_and_samples(package):
    model, ids = make(dtype=torch.float32), token_ids(2, LENGTH)
    common = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
    with press_of(package)(model):
        beams = model.generate(ids, num_beams=3, num_return_sequences=2, **common)
        torch.manual_seed(0)
        samples = model.generate(ids, do_sample=True, num_return_sequences=2, **common)
    assert beams.shape == samples.shape == (4, LENGTH + 5)


def test_beam_search_of_both_mechanisms_agrees():
    model, ids = make(), token_ids(2, LENGTH)
    options = {"max_new_tokens": 6, "num_beams": 3, "pad_token_id": 0, "eos_token_id": None}
    found = []
    for package in (hooks_impl, patch_impl):
        with press_of(package)(model):
            found.append(model.generate(ids, **options))
    assert torch.equal(*found)


@both
@torch.no_grad()
def test_many_questions_on_one_compressed_cache(package):
    """Cropping takes a question off again, down to the pruned context."""
    model, question = make(), token_ids(1, 7, seed=1)
    cache = DynamicCache(config=model.config)
    with press_of(package)(model):
        model(token_ids(1, LENGTH), past_key_values=cache)
    keys = cache.layers[0].keys.clone()
    first = model(question, past_key_values=cache).logits
    cache.crop(-7)
    assert torch.equal(cache.layers[0].keys, keys)
    assert torch.equal(model(question, past_key_values=cache).logits, first)
    with pytest.raises(PressError, match="cannot crop 8 tokens"):
        cache.crop(-8)


@both
@torch.no_grad()
def test_memory_is_freed(package):
    model, cache = make(), DynamicCache(config=make().config)
    full = DynamicCache(config=model.config)
    model(token_ids(1, LENGTH), past_key_values=full)
    with press_of(package)(model):
        model(token_ids(1, LENGTH), past_key_values=cache)
    assert cache_nbytes(cache) * 2 == cache_nbytes(full)
