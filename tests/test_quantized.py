"""Quantized caches: exact keys are judged, and what is kept of them is quantized."""

import itertools
import pickle

import pytest
import torch
from transformers import DynamicCache, QuantizedCache
from transformers.cache_utils import QuantizedLayer

from press_core import PressError, UnsupportedCacheError, cache_nbytes, kept_lengths, prefill
from press_core.running.quantized import PrunedQuantizedLayer
from tests.support import (
    PACKAGES,
    REPLAYING,
    both,
    build,
    example_for,
    filled,
    held,
    left_padded,
    ran,
    token_ids,
    unchanged,
)

pytest.importorskip("optimum.quanto", reason="needs optimum-quanto, a back end of QuantizedCache")
pytest.importorskip("hqq", reason="needs hqq, a back end of QuantizedCache")

KINDS = [("quanto", 4), ("hqq", 2)]
kinds = pytest.mark.parametrize(("backend", "nbits"), KINDS)
LENGTH, RESIDUAL = 40, 6
# Later releases than 5.2 reorder what is quantized when they next dequantize it.
REORDERS = hasattr(QuantizedLayer, "_apply_pending_reorder")


def quantized(model, backend="quanto", nbits=4, **options):
    """A cache whose last few tokens wait to be quantized, in groups of 16 numbers."""
    options = {"residual_length": RESIDUAL, "q_group_size": 16, **options}
    return QuantizedCache(backend, model.config, nbits=nbits, **options)


def test_exact_keys_are_judged_after_a_reset_too(package, model):
    press, again = package.KnormPress(0.5), quantized(model)
    filled(model, press, token_ids(1, 30), again).reset()
    ids = token_ids(1, LENGTH, seed=1)
    assert held(filled(model, press, ids, again)) == held(filled(model, press, ids))
    few = quantized(model)
    with press(model):
        model.config.num_hidden_layers = 1  # as models that draft for themselves do
        model(ids, past_key_values=few)
    assert isinstance(few.layers[1], QuantizedLayer)


def everything(layer):
    """All keys and values of a layer, as its next update would read them."""
    read = []
    for name in ("keys", "values"):
        states = layer._dequantize(getattr(layer, f"_quantized_{name}"))
        recent = getattr(layer, name)
        read.append(torch.cat((states, recent), dim=2) if recent.numel() else states)
    return read[0], read[1]


def assert_same_bits(layers, others):
    """Both hold the same, and as many tokens wait to be quantized."""
    for layer, expected in zip(layers, others, strict=True):
        assert all(map(torch.equal, everything(layer), everything(expected)))
        assert layer.keys.shape == expected.keys.shape


def filled_by_hand(cache, model, press, ids, **given):
    """`cache` with the keys and values that `press` leaves in a plain one; and that one."""
    plain = filled(model, press, ids, **given)
    for i, layer in enumerate(plain.layers):
        cache.layers[i].update(layer.keys, layer.values)
    return cache, plain


# Any number of tokens and every kind of input; each evicts as many tokens of every head.
EVEN = ["SnapKVPress", "KnormPress", "PyramidKVPress", "ObservedAttentionPress", "ThinKPress"]
EVEN += ["ComposedPress", "KeyRerotationPress", "ChunkKVPress"]
OPTIONS = [{"backend": backend, "nbits": nbits} for backend, nbits in KINDS]
LATER = ["CAMPress", "DecodingPress", "H2OPress", "MergingPress", "StreamingLLMDecodingPress"]
AXES = [{"axis_key": k, "axis_value": v, "q_group_size": 8} for k, v in [(0, 0), (-1, -1), (0, -1)]]


@pytest.mark.parametrize(
    ("name", "options", "padding"),
    [
        *itertools.product(EVEN, OPTIONS, [0]),
        *(("KnormPress", axes, 0) for axes in AXES),
        *(("SnapKVPress", options, 13) for options in OPTIONS),
    ],
)
def test_it_is_what_quantizing_the_pruned_keys_gives(package, name, options, padding, model):
    """Rows of other lengths share one layer."""
    press = example_for(package, name, 0.5, model)
    ids, mask, positions = left_padded(2, LENGTH, [0, padding])
    given = {"attention_mask": mask, "position_ids": positions}
    expected, plain = filled_by_hand(quantized(model, **options), model, press, ids, **given)
    cache, (logits,) = ran(model, press, [ids], quantized(model, **options), **given)
    assert torch.equal(logits, model(ids, **given).logits)  # the prefill itself sees exact keys
    assert_same_bits(cache.layers, expected.layers)
    for layer, exact in zip(cache.layers, plain.layers, strict=True):
        assert type(layer) is PrunedQuantizedLayer
        assert torch.equal(layer.positions, exact.positions)
        assert layer.get_seq_length() == exact.get_seq_length()
    assert held(cache) == held(plain)


@kinds
def test_decoding_goes_on_as_from_there(package, backend, nbits, model):
    """Through several fillings of the residual window, and a question at once."""
    press, ids = package.SnapKVPress(0.5, window_size=8), token_ids(2, LENGTH)
    expected, _ = filled_by_hand(quantized(model, backend, nbits), model, press, ids)
    cache = filled(model, press, ids, quantized(model, backend, nbits))
    seen, n_flushed = LENGTH, 0
    for n_new in [1] * 8 + [3] + [1] * 9:
        new = token_ids(2, n_new, seed=seen)
        positions = torch.arange(seen, seen + n_new)[None]
        logits = model(new, past_key_values=cache).logits
        by_hand = model(new, past_key_values=expected, position_ids=positions).logits
        assert torch.equal(logits, by_hand)
        assert_same_bits(cache.layers, expected.layers)
        seen += n_new
        n_flushed += cache.layers[0].keys.dim() < 4
        assert cache.get_seq_length() == seen
        assert kept_lengths(cache)[0].unique().tolist() == [seen - LENGTH // 2]
    assert n_flushed >= 2


@kinds
def test_nothing_evicted_leaves_the_layers_as_they_were(package, backend, nbits, model):
    given = [token_ids(2, LENGTH), *token_ids(2, 9).split(1, dim=1)]
    press = package.SnapKVPress(0.0, window_size=8)
    plain, expected = ran(model, None, given, quantized(model, backend, nbits))
    pressed, logits = ran(model, press, given, quantized(model, backend, nbits))
    assert all(torch.equal(one, other) for one, other in zip(expected, logits, strict=True))
    assert [*map(type, pressed.layers)] == [*map(type, plain.layers)]
    assert_same_bits(pressed.layers, plain.layers)


@kinds
def test_bytes_are_those_of_the_codes(package, backend, nbits):
    model = build("llama", head_dim=64)
    sizes = {}
    for ratio in (0.0, 0.5):
        stored = quantized(model, backend, nbits, q_group_size=64)
        for kind, cache in (("plain", DynamicCache()), ("quantized", stored)):
            filled(model, package.KnormPress(ratio), token_ids(1, 256), cache)
            sizes[kind, ratio] = cache_nbytes(cache)
    assert sizes["quantized", 0.5] == pytest.approx(sizes["quantized", 0.0] / 2, rel=0.01)
    # Per group of 64 numbers: codes, a scale and a shift of up to 4 bytes each.
    codes, scales = (sizes["plain", 0.5] * share for share in (nbits / 32, 8 / (4 * 64)))
    assert codes < sizes["quantized", 0.5] <= (codes + scales) * 1.01


@kinds
@pytest.mark.parametrize("name", LATER)
def test_both_mechanisms_leave_the_same_bits(backend, nbits, name, model):
    given = [token_ids(2, LENGTH), token_ids(2, 3, seed=1), *token_ids(2, 10).split(1, dim=1)]
    presses = [example_for(package, name, 0.5, model) for package in PACKAGES]
    runs = [ran(model, press, given, quantized(model, backend, nbits)) for press in presses]
    caches, logits = zip(*runs, strict=True)
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    assert_same_bits(*(cache.layers for cache in caches))


# ---- while decoding ------------------------------------------------------------------------------


@kinds
def test_what_is_read_is_pruned_and_written_back(package, backend, nbits, model):
    """By the norms of the keys as they are read, which quantizing has changed."""
    press = package.DecodingPress(package.KnormPress(), 4, 20)
    cache, pruned = quantized(model, backend, nbits), 0
    with press(model):
        model(token_ids(2, LENGTH), past_key_values=cache)
        for step in range(1, 13):
            before = [everything(layer) for layer in cache.layers]
            new = collected(model, cache, token_ids(2, 1, seed=step))
            for i, layer in enumerate(cache.layers):
                keys, values = (torch.cat(x, 2) for x in zip(before[i], new[i], strict=True))
                if step % 4:
                    assert kept_lengths(cache)[i].unique().tolist() == [keys.shape[2]]
                    continue
                best = (-keys.norm(dim=-1)).topk(20, dim=-1).indices.sort(dim=-1).values
                index = best.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
                by_hand = quantized(model, backend, nbits).layers[0]
                by_hand.update(keys.gather(2, index), values.gather(2, index))
                assert_same_bits([layer], [by_hand])
                pruned += 1
            assert cache.get_seq_length() == LENGTH + step
    assert pruned == 3 * 3  # layers, and steps in which they are


def collected(model, cache, ids):
    """The exact new keys and values per layer of a forward."""
    found, update = [], cache.update
    cache.update = lambda *given, **more: found.append(given[:2]) or update(*given, **more)
    model(ids, past_key_values=cache)
    del cache.update
    return found


# ---- what cannot be ------------------------------------------------------------------------------

HEADWISE = ["AdaKVPress", "CriticalAdaKVPress", "DMSPress", "DuoAttentionPress", "FastKVzipPress"]
REFUSED = [*((name, "each head") for name in [*HEADWISE, "LUKVPress"]), ("ThinKPress", "channels")]
REFUSED += [(name, "whole contexts.*QuantizedLayer") for name in REPLAYING]


@both
@pytest.mark.parametrize(("name", "why"), REFUSED)
def test_what_cannot_be_stored_is_refused(package, name, why, model):
    press, cache = example_for(package, name, 0.5, model), quantized(model)
    if name == "ThinKPress":
        press.free_memory = True
    with unchanged(model), pytest.raises(UnsupportedCacheError, match=f"{why}.*DynamicCache"):
        filled(model, press, token_ids(1, LENGTH), cache)
    assert cache.get_seq_length() == 0


@both
@pytest.mark.parametrize("layer", [0, 2])
def test_a_prefill_that_has_failed_leaves_the_cache_empty(package, layer, model):
    """No exact keys stay in it, and the next prefill quantizes them as ever."""
    press, ids = package.KnormPress(0.5), token_ids(1, LENGTH)
    expected, cache = quantized(model), quantized(model)
    filled(model, press, ids, expected)
    broken = model.model.layers[layer].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), press(model):
        model(ids, past_key_values=cache)
    broken.remove()
    assert cache.get_seq_length() == 0
    filled(model, press, ids, cache)
    assert_same_bits(cache.layers, expected.layers)


@both
def test_what_is_quantized_is_not_cropped(package, model):
    cache = filled(model, package.KnormPress(0.5), token_ids(1, LENGTH), quantized(model))
    model(token_ids(1, 3), past_key_values=cache)
    expected = [everything(layer) for layer in cache.layers]
    with pytest.raises(UnsupportedCacheError, match="latest tokens"):
        cache.crop(-2)
    for layer, states in zip(cache.layers, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(everything(layer), states, strict=True))


@both
@kinds
@pytest.mark.parametrize("n_later", [0, 3, RESIDUAL])
def test_rows_are_reordered_or_it_is_refused(package, backend, nbits, n_later, model):
    """What is quantized and what waits for it follow alike; never one without the other."""
    cache, rows = quantized(model, backend, nbits), torch.tensor([2, 0, 0])
    given = [token_ids(3, LENGTH), *(token_ids(3, 1, seed=step) for step in range(n_later))]
    ran(model, package.KnormPress(0.5), given, cache)
    refused = [(cache.batch_select_indices, torch.tensor([1])), (cache.batch_repeat_interleave, 2)]
    for operate, how in refused + [(cache.reorder_cache, rows)] * (not REORDERS):
        with pytest.raises(UnsupportedCacheError, match="quantized"):
            operate(how)
    if not REORDERS:
        return
    untouched = pickle.loads(pickle.dumps(cache))
    cache.reorder_cache(rows)
    for ids in token_ids(3, 2).split(1, dim=1):
        found = model(ids[rows], past_key_values=cache).logits
        assert torch.equal(found, model(ids, past_key_values=untouched).logits[rows])
    with pytest.raises(PressError):
        cache.crop(-1)


@both
@kinds
def test_a_prefill_in_chunks_is_refused_before_it_is_run(package, backend, nbits, model):
    """Exact keys of earlier chunks would be judged, and are gone."""
    ids, cache = token_ids(1, LENGTH), quantized(model, backend, nbits)
    with package.KnormPress(0.5)(model), pytest.raises(UnsupportedCacheError, match="exact keys"):
        prefill(model, ids, cache, chunk_size=16)
    assert cache.get_seq_length() == 0
    model(ids, past_key_values=cache)  # nothing was left in it
    assert cache.get_seq_length() == LENGTH
