"""Presses of which every head keeps its own tokens, or keys some channels only, end to end.

The reference holds everything: a plain cache on a model of the same weights, of which each head is
shown what it should have kept, by a mask. What holds of every press stands in `test_generation.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from attention_patch import headwise
from experiments.testbed.recipes import PROMPTS
from press_core import (
    HyperparameterError,
    ScopeError,
    UnsupportedCacheError,
    UnsupportedInputError,
    attention_sites,
    cache_nbytes,
    kept_lengths,
)
from press_core.cache.channels import ChannelPrunedLayer
from press_core.learned.duo_attention import HeadScores
from tests.slow import INF, Whole
from tests.support import (
    GREEDY,
    both,
    build,
    example_for,
    filled,
    forwards,
    held,
    left_padded,
    token_ids,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
LENGTH = 40
FORWARDS = [LENGTH, 5, 1, 1, 3, 1]
PADDING = [0, 9, 23]
ACT_LAST = ("FastKVzipPress", "KVgradPress", "KVzipPress", "RestoreKVPress")
"""Those that act when all layers have run; all but the first run the context again."""
HEADWISE = ("AdaKVPress", "CriticalAdaKVPress", "DMSPress", "DuoAttentionPress", "LUKVPress")


@pytest.fixture(autouse=True)
def _not_compiled():
    """A compiled kernel takes a C++ compiler and half a minute per shape, and adds nothing."""
    with torch.compiler.set_stance("force_eager"):
        yield


def ada(package: Any, ratio: float = 0.6) -> Any:
    return package.AdaKVPress(package.KnormPress(ratio), alpha_safeguard=0.1)


def duo(package: Any, model: Any) -> Any:
    """Half of the heads stream, others in each layer."""
    sites = {site.layer_idx: site for site in attention_sites(model)}
    n_kv = next(iter(sites.values())).num_kv_heads
    scores = torch.full((model.config.num_hidden_layers, n_kv), INF)
    for i, layer in enumerate(sites):
        scores[layer] = torch.arange(n_kv).roll(i).float()
    scores = HeadScores(scores)
    return package.DuoAttentionPress(0.5, head_scores=scores, sink_size=2, recent_size=6)


def dms(package: Any, model: Any) -> Any:
    """About half of the tokens score below its threshold."""
    layers = filled(model, None, token_ids(1, LENGTH)).layers
    keys = [layers[site.layer_idx].keys for site in attention_sites(model)]
    threshold = -float(torch.stack(keys).norm(dim=-1).median())
    return package.DMSPress(package.KnormPress(), threshold, 6, decoding=True)


PRESSES: dict[str, Callable[[Any, Any], Any]] = {
    "ada": lambda p, m: p.AdaKVPress(p.SnapKVPress(0.6, window_size=4), alpha_safeguard=0.1),
    "dms": dms,
    "duo": duo,
    "kvzip": lambda p, m: p.KVzipPress(0.6, chunk_size=16, prompts=PROMPTS, n_sink=2),
}


def make(family: str = "llama", **options: Any) -> Any:
    """In float64 where that goes, so that a rounding error decides no top-k."""
    # Masks of eager overflow in float64, as transformers makes them.
    eager = family in ("gemma2", "gpt_oss") or options.get("attn_implementation") == "eager"
    options.setdefault("attn_implementation", "eager" if eager else "sdpa")
    options.setdefault("dtype", torch.float32 if eager else torch.float64)
    return build(family, **options)


def tolerance(model: Any) -> float:
    return 1e-10 if model.dtype == torch.float64 else 2e-5


# ---- against heads that are shown what they keep -------------------------------------------------


def check_against_whole(press: Any, model: Any, whole: Whole) -> None:
    cache, atol = DynamicCache(config=model.config), tolerance(model)
    pruned = [site.layer_idx for site in attention_sites(model)]
    with press(model):
        for step, ids in enumerate(forwards(FORWARDS, batch=2)):
            logits = model(ids, past_key_values=cache).logits
            torch.testing.assert_close(logits, whole(ids), rtol=0, atol=atol)
            whole.shown = held(cache)
            for i in pruned:
                assert cache.layers[i].get_seq_length() == sum(FORWARDS[: step + 1])
                full, heads = whole.cache.layers[i], len(whole.shown[i][0])
                for row in range(2):
                    for head, positions in enumerate(whole.shown[i][row]):
                        found = cache.layers[i].head(row * heads + head)
                        for states, everything in zip(found, (full.keys, full.values), strict=True):
                            expected = everything[row, head, positions]
                            torch.testing.assert_close(states, expected, rtol=0, atol=atol)
    counts = [count for i in pruned for count in cache.layers[i].counts]
    assert sum(counts) < 0.8 * len(counts) * sum(FORWARDS)
    assert len(set(counts)) > 1


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("name", PRESSES)
def test_families(package, family, name):
    model = make(family)
    check_against_whole(PRESSES[name](package, model), model, Whole(make(family)))


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_attention_implementations(package, implementation, family):
    model = make(family, attn_implementation=implementation, dtype=torch.float32)
    whole = Whole(make(family, attn_implementation="eager"))
    check_against_whole(PRESSES["ada"](package, model), model, whole)


@pytest.mark.parametrize("num_kv_heads", [1, 4, 8])
def test_groups(package, num_kv_heads):
    model, other = (make(num_heads=8, num_kv_heads=num_kv_heads) for _ in range(2))
    check_against_whole(dms(package, model), model, Whole(other))


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_padding_is_not_stored(package, implementation):
    model = make(attn_implementation=implementation, dtype=torch.float32)
    ids, mask, positions = left_padded(3, LENGTH, PADDING)
    press, cache = PRESSES["ada"](package, model), DynamicCache(config=model.config)
    with press(model):
        for new in (ids, *forwards([3, 1], batch=3)):
            if new is not ids:
                mask = torch.cat((mask, torch.ones_like(new)), dim=1)
                positions = positions[:, -1:] + 1 + torch.arange(new.shape[1])
            given = {"attention_mask": mask, "position_ids": positions}
            assert model(new, past_key_values=cache, **given).logits.isfinite().all()
    for layer, lengths in zip(held(cache), kept_lengths(cache), strict=True):
        assert lengths.sum(dim=-1).tolist() == [2 * (int((LENGTH - n) * 0.4) + 4) for n in PADDING]
        for row, n in enumerate(PADDING):
            assert all(min(head) >= n for head in layer[row])


@pytest.mark.parametrize("ratio", [0.2, 0.9])
@pytest.mark.parametrize("name", ["AdaKVPress", "CriticalAdaKVPress"])
def test_bytes_while_decoding_are_those_of_what_is_held(package, name, ratio):
    """And of a few per cent of room."""
    model = build("llama", num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8)
    ids, cache = token_ids(1, 2048), DynamicCache(config=model.config)
    full = cache_nbytes(filled(model, None, ids))
    with package.PRESSES[name](package.KnormPress(ratio))(model):
        model(ids, past_key_values=cache)
        assert sum(cache.layers[0].counts) == pytest.approx(2048 * 4 * (1 - ratio), abs=8)
        assert max(cache.layers[0].counts) > min(cache.layers[0].counts)
        assert cache_nbytes(cache) <= (1 - ratio) * 1.03 * full
        for step in range(30):
            model(token_ids(1, 1, seed=step), past_key_values=cache)
    assert cache_nbytes(cache) <= ((1 - ratio) * 2048 + 30) * 1.03 * full / 2048


# ---- fewer channels ------------------------------------------------------------------------------


def think(package: Any, free_memory: bool, ratio: float = 0.5) -> Any:
    return package.ThinKPress(ratio, window_size=8, free_memory=free_memory)


def run(model: Any, press: Any, given: list[Tensor]) -> tuple[Any, list[Tensor]]:
    cache = DynamicCache(config=model.config)
    with press(model):
        return cache, [model(ids, past_key_values=cache).logits for ids in given]


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize(
    "family", ["llama", "gpt_neox", "gpt2", "qwen3", "gemma2", "gpt_oss", "cohere"]
)
def test_channels_left_out_are_as_good_as_zeros(package, family, implementation):
    if implementation != "sdpa" and family != "llama":
        return
    options = {} if implementation == "sdpa" else {"attn_implementation": "eager"}
    model, given = make(family, **options), forwards([LENGTH, 5, *[1] * 6, 3], batch=2)
    whole, zeroed = run(model, think(package, False), given)
    if implementation == "flex_attention":
        model = make(attn_implementation="flex_attention", dtype=torch.float32)
    cache, freed = run(model, think(package, True), given)
    for one, other in zip(zeroed, freed, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=tolerance(model))
    for site in attention_sites(model):
        layer, kept = cache.layers[site.layer_idx], whole.layers[site.layer_idx].keys
        assert isinstance(layer, ChannelPrunedLayer)
        assert layer.channels.shape[-1] == layer.keys.shape[-1] == site.head_dim // 2
        for of_row, row in zip(layer.channels, kept[:, :, :LENGTH].any(dim=2), strict=True):
            for channels, of_head in zip(of_row, row, strict=True):
                assert channels.tolist() == of_head.nonzero().flatten().tolist()


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_bytes_of_channels_left_out_are_free(package, ratio):
    model, ids = build("llama"), token_ids(1, 200)
    presses = None, think(package, False, ratio), think(package, True, ratio)
    full, zeroed, freed = (cache_nbytes(filled(model, press, ids)) for press in presses)
    assert zeroed == full
    assert freed == full * (1 - ratio / 2)
    assert [press.compression_ratio for press in presses[1:]] == [ratio / 2] * 2
    assert presses[2].evicted_ratio == 0


@both
def test_fewer_channels_need_a_scope(package):
    model, ids = make(), token_ids(1, 4, seed=2)
    caches = [filled(model, think(package, True), token_ids(1, LENGTH)) for _ in range(2)]
    for other in (headwise(make()), package.KnormPress(0.5)(model)):
        with other, pytest.raises(ScopeError, match=r"attention_patch\.headwise\(model\)"):
            model(ids, past_key_values=caches[0])
    with think(package, True)(model):
        expected = model(ids, past_key_values=caches[0]).logits
    with headwise(model):
        assert torch.equal(model(ids, past_key_values=caches[1]).logits, expected)


def test_fewer_channels_with_beams_and_questions(package):
    model, ids, found = make(), token_ids(2, LENGTH), []
    for free_memory in (False, True):
        with think(package, free_memory)(model):
            found.append(model.generate(ids, num_beams=3, max_new_tokens=8, **GREEDY))
    assert torch.equal(*found)
    cache = filled(model, think(package, True), ids)
    with headwise(model):
        model(ids[:, :5], past_key_values=cache)
        cache.crop(-5)
        with pytest.raises(UnsupportedCacheError, match="cannot crop"):
            cache.crop(-1)


@both
def test_fewer_channels_of_fewer_tokens(package):
    """After a press that evicts tokens; not before it, for it could not read the keys."""
    model, logits, cache = make(), [], None
    for free_memory in (False, True):
        press = package.ComposedPress([package.KnormPress(0.5), think(package, free_memory)])
        cache, found = run(model, press, forwards(FORWARDS, batch=2))
        logits.append(torch.cat(found, dim=1))
    assert cache.layers[0].keys.shape == (2, 2, LENGTH // 2, 8)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-10)
    with pytest.raises(HyperparameterError):
        package.ComposedPress([think(package, True), package.KnormPress(0.5)])


# ---- what cannot be ------------------------------------------------------------------------------


class Offloaded(DynamicCache):
    """Says that it moves its layers away, as one on a GPU does."""

    offloading = property(lambda self: True, lambda self, value: None)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        if layer_idx == len(self.layers):
            self.layers.append(self.layer_class_to_replicate())
        return self.layers[layer_idx].update(keys, values)


every_press = pytest.mark.parametrize("name", [*HEADWISE, *ACT_LAST, "channels"])


def press_of(package: Any, name: str, model: Any) -> Any:
    return think(package, True) if name == "channels" else example_for(package, name, 0.6, model)


@both
@every_press
def test_offloaded_caches_are_refused(package, name):
    model = make()
    with (
        press_of(package, name, model)(model),
        pytest.raises(UnsupportedCacheError, match="without offloading"),
    ):
        model(token_ids(1, LENGTH), past_key_values=Offloaded())


@pytest.mark.parametrize("name", [*ACT_LAST[1:], "KVComposePress"])
def test_rows_that_cannot_be_replayed_alone_are_refused(package, name):
    """Rows are replayed without their padding, which sliding layers have let go of."""
    model, (ids, mask, positions) = make("gemma2"), left_padded(3, LENGTH, PADDING)
    press = example_for(package, name, 0.6, model)
    with pytest.raises(UnsupportedCacheError, match="run them one by one"):
        filled(model, press, ids, attention_mask=mask, position_ids=positions)


@both
@pytest.mark.parametrize("name", [*HEADWISE, *ACT_LAST[1:], "channels"])
def test_no_press_prunes_heads_of_different_lengths_again(package, name):
    """(Fast KVzip acts when all layers have run, on what the outer scope has left.)"""
    model = make()
    error, said = UnsupportedInputError, "open that scope outermost"
    if name in ACT_LAST:
        error, said = UnsupportedCacheError, "use it alone"
    with package.KnormPress(0.5)(model), pytest.raises(error, match=said):
        filled(model, press_of(package, name, model), token_ids(1, LENGTH))


@both
@every_press
def test_dropout_is_refused(package, name):
    model = build("llama", attn_implementation="eager")
    press, cache = press_of(package, name, model), DynamicCache(config=model.config)
    with press(model):
        model(token_ids(1, LENGTH), past_key_values=cache)
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(UnsupportedInputError, match=r"no dropout, got 0.1; call model\.eval"):
            model(token_ids(1, 1), past_key_values=cache)
