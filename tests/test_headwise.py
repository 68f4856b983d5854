"""Keys of which some channels are kept only, and what presses that act by head refuse.

What heads of different lengths answer is judged in `test_dense_oracle.py`; what holds of every
press stands in `test_generation.py`.
"""

import pytest
import torch
from transformers import DynamicCache

from attention_patch import headwise
from press_core import (
    HyperparameterError,
    ScopeError,
    UnsupportedCacheError,
    UnsupportedInputError,
    attention_sites,
)
from press_core.cache.in_place import ChannelPrunedLayer
from tests.support import both, example_for, filled, forwards, make, ran, token_ids, tolerance

LENGTH = 40
ACT_LAST = ("FastKVzipPress", "KVgradPress", "KVzipPress", "RestoreKVPress")
"""Those that act when all layers have run; all but the first run the context again."""
HEADWISE = ("AdaKVPress", "CriticalAdaKVPress", "DMSPress", "DuoAttentionPress", "LUKVPress")


# ---- fewer channels ------------------------------------------------------------------------------


def think(package, free_memory):
    return package.ThinKPress(0.5, window_size=8, free_memory=free_memory)


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize(
    "family", ["llama", "gpt_neox", "gpt2", "qwen3", "gemma2", "gpt_oss", "cohere"]
)
def test_channels_left_out_are_as_good_as_zeros(package, family, implementation):
    if implementation != "sdpa" and family != "llama":
        return
    options = {} if implementation == "sdpa" else {"attn_implementation": "eager"}
    model, given = make(family, **options), forwards([LENGTH, 5, *[1] * 6, 3], batch=2)
    whole, zeroed = ran(model, think(package, False), given)
    if implementation == "flex_attention":
        model = make(attn_implementation="flex_attention", dtype=torch.float32)
    cache, freed = ran(model, think(package, True), given)
    torch.testing.assert_close(freed, zeroed, rtol=0, atol=tolerance(model))
    for site in attention_sites(model):
        layer, kept = cache.layers[site.layer_idx], whole.layers[site.layer_idx].keys
        assert isinstance(layer, ChannelPrunedLayer)
        assert layer.channels.shape[-1] == layer.keys.shape[-1] == site.head_dim // 2
        for of_row, row in zip(layer.channels, kept[:, :, :LENGTH].any(dim=2), strict=True):
            for channels, of_head in zip(of_row, row, strict=True):
                assert channels.tolist() == of_head.nonzero().flatten().tolist()


@both
@pytest.mark.parametrize("n_new", [1, 4])
def test_fewer_channels_need_a_scope(package, n_new):
    model, ids = make(), token_ids(1, n_new, seed=2)
    caches = [filled(model, think(package, True), token_ids(1, LENGTH)) for _ in range(2)]
    for other in (headwise(make()), package.KnormPress(0.5)(model)):
        with other, pytest.raises(ScopeError, match=r"attention_patch\.headwise\(model\)"):
            model(ids, past_key_values=caches[0])
    _, expected = ran(model, think(package, True), [ids], caches[0])
    _, found = ran(model, headwise, [ids], caches[1])
    assert torch.equal(*found, *expected)
    caches[1].crop(-n_new)
    with pytest.raises(UnsupportedCacheError, match=r"cannot crop 1 token.* assistant"):
        caches[1].crop(-1)


@both
def test_fewer_channels_of_fewer_tokens(package):
    """After a press that evicts tokens; not before it, for it could not read the keys."""
    model, logits, cache = make(), [], None
    for free_memory in (False, True):
        press = package.ComposedPress([package.KnormPress(0.5), think(package, free_memory)])
        cache, found = ran(model, press, forwards([LENGTH, 5, 1, 1, 3, 1], batch=2))
        logits.append(torch.cat(found, dim=1))
    assert cache.layers[0].keys.shape == (2, 2, LENGTH // 2, 8)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-10)
    with pytest.raises(HyperparameterError):
        package.ComposedPress([think(package, True), package.KnormPress(0.5)])


# ---- what cannot be ------------------------------------------------------------------------------


class Offloaded(DynamicCache):
    """Says that it moves its layers away, as one on a GPU does."""

    offloading = property(lambda self: True, lambda self, value: None)

    def update(self, keys, values, layer_idx, *_, **__):
        if layer_idx == len(self.layers):
            self.layers.append(self.layer_class_to_replicate())
        return self.layers[layer_idx].update(keys, values)


def press_of(package, name, model):
    return think(package, True) if name == "channels" else example_for(package, name, 0.6, model)


@both
@pytest.mark.parametrize("name", [*HEADWISE, *ACT_LAST, "channels"])
def test_offloaded_caches_are_refused(package, name):
    model = make()
    with pytest.raises(UnsupportedCacheError, match="without offloading"):
        filled(model, press_of(package, name, model), token_ids(1, LENGTH), Offloaded())


@both
@pytest.mark.parametrize("name", [*HEADWISE, *ACT_LAST[1:], "channels"])
def test_no_press_prunes_heads_of_different_lengths_again(package, name):
    """(Fast KVzip acts when all layers have run, on what the outer scope has left.)"""
    model = make()
    error, said = UnsupportedInputError, "a press left .*open that scope outermost"
    if name in ACT_LAST:
        error, said = UnsupportedCacheError, "use it alone"
    with package.KnormPress(0.5)(model), pytest.raises(error, match=said):
        filled(model, press_of(package, name, model), token_ids(1, LENGTH))
