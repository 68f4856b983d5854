"""Presses made of presses, and those that prune in a way of their own, against slow references."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import hooks_impl
import patch_impl
from press_core import (
    HyperparameterError,
    ScopeError,
    UnsupportedModelError,
    attention_sites,
    kept_lengths,
)
from press_core.forward import Arguments
from tests.support import build, left_padded, snapshot, token_ids, watched

both = pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
LENGTH = 60
INF = float("inf")
Kept = list[list[list[int]]]


def make(family: str = "llama", num_layers: int = 2, **options: Any) -> Any:
    """In float64, so that a rounding error decides no top-k."""
    return build(family, num_layers=num_layers, **{"dtype": torch.float64, **options})


def prefill(model: Any, press: Any, ids: Tensor, **arguments: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with press(model), torch.no_grad():
        model(ids, past_key_values=cache, **arguments)
    return cache


def whole(model: Any, ids: Tensor, **arguments: Any) -> DynamicCache:
    """The cache that nothing was evicted from."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, **arguments)
    return cache


def kept_in(layer: Any) -> Kept:
    """Positions that each head of each row keeps."""
    if getattr(layer, "positions", None) is None:
        batch, heads, length, _ = layer.keys.shape
        return [[list(range(length))] * heads] * batch
    return [[[p for p in head if p >= 0] for head in row] for row in layer.positions.tolist()]


def best(scores: list[float], n: int) -> list[int]:
    """The `n` best, of equal ones the latest."""
    ranked = sorted(range(len(scores)), key=lambda i: (scores[i], i), reverse=True)
    return sorted(ranked[:n])


def per_head(
    cache: DynamicCache, layer: int, choose: Callable[[Tensor, Tensor], list[int]]
) -> Kept:
    """What `choose(keys (S, d), values (S, d))` says of each head of each row."""
    states = cache.layers[layer].keys, cache.layers[layer].values
    return [
        [choose(*of_head) for of_head in zip(*of_row, strict=True)]
        for of_row in zip(*states, strict=True)
    ]


def queries_and_keys(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per layer, query `(B, H_kv, G, S, d)` and keys `(B, H_kv, S, d)` of a prefill."""
    with watched() as seen:
        whole(model, ids)
    found = []
    for layer in sorted(seen):
        ((query, keys),) = seen[layer]
        found.append((query.unflatten(1, (keys.shape[1], -1)), keys))
    return found


@contextmanager
def seeing(model: Any, visible: dict[int, Tensor]) -> Iterator[None]:
    """Attend over an uncompressed cache, of whose first tokens each head sees some only.

    Args:
        visible: per layer `(B, H_kv, S)` bool.
    """
    handles = []
    for site in attention_sites(model):

        def hook(_: Any, args: Any, kwargs: Any, site: Any = site) -> Any:
            hidden = Arguments(args, kwargs, site.signature.parameters).get("hidden_states")
            past = (
                Arguments(args, kwargs, site.signature.parameters)
                .get(site.signature.cache_name)
                .layers[site.layer_idx]
                .get_seq_length()
            )
            n_new, first = hidden.shape[1], visible[site.layer_idx]
            shape = hidden.shape[0], site.num_heads, n_new, past + n_new
            mask = torch.ones(shape, dtype=torch.bool).tril(past)
            per_query_head = first.repeat_interleave(site.num_heads // first.shape[1], dim=1)
            mask[..., : first.shape[-1]] &= per_query_head.unsqueeze(2)
            added = torch.zeros(shape, dtype=hidden.dtype).masked_fill_(
                ~mask, torch.finfo(torch.float32).min
            )
            changed = Arguments(args, kwargs, site.signature.parameters).replace(
                attention_mask=added
            )
            return changed.args, changed.kwargs

        handles.append(site.module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def as_mask(layer: Any, length: int) -> Tensor:
    """`(B, H_kv, length)` bool: what of the first tokens a layer keeps."""
    return torch.tensor(
        [[[p in set(head) for p in range(length)] for head in row] for row in kept_in(layer)]
    )


# ---- slow scores ---------------------------------------------------------------------------------


def norms(keys: Tensor) -> list[float]:
    return [-(sum(x * x for x in key) ** 0.5) for key in keys.tolist()]


def cosines(keys: Tensor) -> list[float]:
    unit = keys / keys.norm(dim=-1, keepdim=True)
    mean = unit.mean(dim=0)
    return [-float(key @ mean / mean.norm()) for key in unit]


def votes(queries: Tensor, keys: Tensor, scaling: float = 0.25) -> list[float]:
    """Mean attention on each key of the last queries `(G, w, d)`."""
    total, rows = torch.zeros(len(keys), dtype=keys.dtype), queries.shape[1]
    for member in queries:
        for index, query in enumerate(member):
            seen = len(keys) - rows + index + 1
            total[:seen] += (keys[:seen] @ query * scaling).softmax(dim=0)
    mean: list[float] = (total / (len(queries) * rows)).tolist()
    return mean


def snapkv(queries: Tensor, keys: Tensor, window: int, kernel: int = 5) -> list[float]:
    """SnapKV's scores from the queries of all keys, `(G, S, d)`."""
    before, half = len(keys) - window, kernel // 2
    found = votes(queries[:, -window:], keys)[:before]
    pooled = [sum(found[max(0, j - half) : j + half + 1]) / kernel for j in range(before)]
    return pooled + [INF] * window


# ---- one after the other -------------------------------------------------------------------------


@both
def test_composed_presses_act_in_order(package):
    model = make()
    many, few = package.StreamingLLMPress(0.5, n_sink=10), package.StreamingLLMPress(0.5, n_sink=2)
    # many keeps 0..9 and 40..59; few keeps 0, 1 and 32..59
    expected = [
        ([many, few], [0, 1, *range(47, 60)]),
        ([few, many], [0, 1, *range(32, 40), *range(55, 60)]),
    ]
    for presses, positions in expected:
        cache = prefill(model, package.ComposedPress(presses), token_ids(2, LENGTH))
        assert [kept_in(layer) for layer in cache.layers] == [[[positions] * 2] * 2] * 2


@both
def test_a_second_press_judges_only_what_the_first_has_left(package):
    model, ids = make(), token_ids(2, LENGTH)
    press = package.ComposedPress([package.KnormPress(0.4), package.KeyDiffPress(0.5)])
    cache, full = prefill(model, press, ids), whole(model, ids)

    def choose(keys: Tensor, _: Tensor) -> list[int]:
        first = best(norms(keys), 36)
        return [first[i] for i in best(cosines(keys[first]), 18)]

    for index, layer in enumerate(cache.layers):
        assert kept_in(layer) == per_head(full, index, choose)


@both
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_queries_follow_what_is_kept(package, family):
    """SnapKV's window is the last tokens that are left, those of each head, with their queries."""
    model, ids = make(family, num_kv_heads=2), token_ids(2, LENGTH)
    press = package.ComposedPress(
        [package.KnormPress(0.4), package.SnapKVPress(0.5, window_size=6)]
    )
    cache = prefill(model, press, ids)
    for layer, (queries, keys) in zip(cache.layers, queries_and_keys(model, ids), strict=True):
        for row, positions in enumerate(kept_in(layer)):
            for head, found in enumerate(positions):
                first = best(norms(keys[row, head]), 36)
                scores = snapkv(queries[row, head][:, first], keys[row, head, first], 6)
                assert found == [first[i] for i in best(scores, 18)]


@both
def test_queries_and_positions_follow_keys_that_are_turned(package):
    """After KeyRerotationPress the next press judges a context of tokens `0 ... n - 1`."""
    model, ids = make(), token_ids(1, LENGTH)
    first = package.KeyRerotationPress(package.StreamingLLMPress(0.5, n_sink=10))
    cache = prefill(
        model, package.ComposedPress([first, package.SnapKVPress(0.5, window_size=6)]), ids
    )
    left = [*range(10), *range(40, 60)]
    before = queries_and_keys(model, ids)
    rotary, turn = model.base_model.rotary_emb, rotate_function(model)

    def turned(states: Tensor) -> Tensor:
        """From the positions that tokens had to `0 ... n - 1`."""
        back, to = (rotary(states, torch.tensor([x])) for x in (left, range(30)))
        states = turn(states, states, back[0], -back[1])[0]
        return turn(states, states, *to)[0]

    for layer, (queries, keys) in zip(cache.layers, before, strict=True):
        queries = turned(queries[:, :, :, left].flatten(1, 2)).unflatten(1, (2, -1))
        keys = turned(keys[:, :, left])
        for head, found in enumerate(kept_in(layer)[0]):
            scores = snapkv(queries[0, head], keys[0, head], 6)
            assert found == [left[i] for i in best(scores, 15)]


PAIRS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "snapkv, knorm": lambda p: (p.SnapKVPress(0.4, window_size=8), p.KnormPress(0.5)),
    "knorm, tova": lambda p: (p.KnormPress(0.4), p.TOVAPress(0.5)),
    "knorm, expected": lambda p: (
        p.KnormPress(0.4),
        p.ExpectedAttentionPress(0.5, n_future_positions=16),
    ),
    "streaming, observed": lambda p: (p.StreamingLLMPress(0.4), p.ObservedAttentionPress(0.5)),
    "chunkkv, keydiff": lambda p: (
        p.ChunkKVPress(p.KnormPress(0.4), chunk_length=7),
        p.KeyDiffPress(0.5),
    ),
    "knorm, chunk": lambda p: (
        p.KnormPress(0.4),
        p.ChunkPress(p.SnapKVPress(0.5, window_size=4), chunk_length=10),
    ),
    "knorm, rerotation": lambda p: (p.KnormPress(0.4), p.KeyRerotationPress(p.KeyDiffPress(0.5))),
    "rerotation, knorm": lambda p: (p.KeyRerotationPress(p.KeyDiffPress(0.4)), p.KnormPress(0.5)),
    "think, knorm": lambda p: (p.ThinKPress(0.4, window_size=8), p.KnormPress(0.5)),
    "knorm, think": lambda p: (p.KnormPress(0.4), p.ThinKPress(0.4, window_size=8)),
    "critical, block": lambda p: (
        p.CriticalKVPress(p.KnormPress(0.4)),
        p.BlockPress(p.KeyDiffPress(0.5), block_size=8),
    ),
    "pyramid, simlayer": lambda p: (
        p.PyramidKVPress(0.4, window_size=4),
        p.SimLayerKVPress(0.0, n_recent=9, n_initial=2),
    ),
}


@both
@pytest.mark.parametrize("name", PAIRS)
@torch.no_grad()
def test_composed_presses_leave_what_nested_scopes_leave(package, name):
    model, ids, question = make(), token_ids(2, LENGTH), token_ids(2, 3, seed=1)
    first, second = PAIRS[name](package)
    caches, logits = [DynamicCache(config=model.config) for _ in range(2)], []
    with package.ComposedPress([first, second])(model):
        model(ids, past_key_values=caches[0])
        logits.append(model(question, past_key_values=caches[0]).logits)
    with second(model), first(model):  # the inner scope acts first
        model(ids, past_key_values=caches[1])
        logits.append(model(question, past_key_values=caches[1]).logits)
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(one.positions, other.positions)
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        assert one.get_seq_length() == other.get_seq_length()
    assert torch.equal(*logits)


@both
def test_ratios_of_composed_presses_multiply(package):
    inner = [package.KnormPress(0.5), package.KnormPress(0.2), package.KnormPress(0.75)]
    press = package.ComposedPress(inner)
    assert press.compression_ratio == pytest.approx(1 - 0.5 * 0.8 * 0.25)
    assert package.ComposedPress([package.ThinKPress(0.5)]).compression_ratio == 0.25
    cache = prefill(make(), press, token_ids(1, LENGTH))
    assert {int(n) for kept in kept_lengths(cache) for n in kept.flatten()} == {6}


@both
def test_a_head_wise_press_may_come_last(package):
    model, ids = make(), token_ids(2, LENGTH)
    ada = package.AdaKVPress(package.KeyDiffPress(0.5), alpha_safeguard=0.1)
    cache = prefill(model, package.ComposedPress([package.KnormPress(0.5), ada]), ids)
    full = whole(model, ids)
    for index, layer in enumerate(cache.layers):
        positions = layer.dense()[2].tolist()
        for row in range(2):
            keys = full.layers[index].keys[row]
            first = [best(norms(of_head), 30) for of_head in keys]
            scores = [cosines(keys[head, first[head]]) for head in range(2)]
            raised = [[*of_head] for of_head in scores]
            for of_head in raised:  # int(15 * 0.1) = 1 safeguarded
                of_head[best(of_head, 1)[0]] = INF
            chosen = best(raised[0] + raised[1], 30)
            expected = [
                [first[head][i - 30 * head] for i in chosen if i // 30 == head] for head in range(2)
            ]
            assert [[p for p in head if p >= 0] for head in positions[row]] == expected


# ---- keys at new positions -----------------------------------------------------------------------


def rotate_function(model: Any) -> Any:
    module = attention_sites(model)[0].module
    return sys.modules[type(module).__module__].apply_rotary_pos_emb


def keys_before_rope(model: Any, ids: Tensor) -> list[Tensor]:
    """Per layer that attends to everything, what the model gave its rotary function as keys."""
    module = attention_sites(model)[0].module
    modeling: Any = sys.modules[type(module).__module__]
    rotate, given = modeling.apply_rotary_pos_emb, []

    def watch(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append(key)
        return rotate(query, key, *args, **kwargs)

    modeling.apply_rotary_pos_emb = watch
    try:
        whole(model, ids)
    finally:
        modeling.apply_rotary_pos_emb = rotate
    return [given[site.layer_idx] for site in attention_sites(model)]


def expected_turned(model: Any, ids: Tensor, kept: Kept, layer: int) -> tuple[Tensor, Tensor]:
    """Kept keys as if they were tokens `0 ... n - 1`, and kept values, `(B, H_kv, n, d)`."""
    site, full = attention_sites(model)[layer], whole(model, ids)
    index = torch.tensor(kept).unsqueeze(-1)
    states = full.layers[site.layer_idx]
    keys, values = (x.take_along_dim(index, dim=2) for x in (states.keys, states.values))
    before = keys_before_rope(model, ids)[layer].take_along_dim(index, dim=2)
    types = {"layer_type": "full_attention"} if "gemma3" in model.config.model_type else {}
    cos, sin = model.base_model.rotary_emb(before, torch.arange(index.shape[2])[None], **types)
    turned = rotate_function(model)(before, before, cos, sin)[1]
    return torch.cat((turned, keys[..., turned.shape[-1] :]), dim=-1), values


def yarn() -> Any:
    """A Llama whose rotary embedding scales attention."""
    config = make().config
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config.max_position_embeddings = 256
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    assert model.base_model.rotary_emb.attention_scaling > 1.1
    return model.eval()


ROTARY: dict[str, Callable[[], Any]] = {
    "llama": make,
    "partial, gpt_neox": lambda: make("gpt_neox"),
    "partial, stablelm": lambda: make("stablelm"),
    "neighbours, cohere": lambda: make("cohere"),
    "scaled, yarn": yarn,
}
rotary_models = pytest.mark.parametrize("name", ROTARY)


@both
@rotary_models
def test_kept_keys_are_turned_to_the_first_positions(package, name):
    model, ids = ROTARY[name](), token_ids(2, LENGTH)
    cache = prefill(model, package.KeyRerotationPress(package.KnormPress(0.5)), ids)
    full = whole(model, ids)
    for index, layer in enumerate(cache.layers):
        kept = kept_in(layer)
        assert kept == per_head(full, index, lambda keys, _: best(norms(keys), 30))
        keys, values = expected_turned(model, ids, kept, index)
        torch.testing.assert_close(layer.keys, keys, rtol=0, atol=1e-6)  # tables are float32
        assert torch.equal(layer.values, values)
        assert layer.get_seq_length() == 30


@both
@rotary_models
@torch.no_grad()
def test_later_positions_continue_from_the_turned_keys(package, name):
    """In the scope and after it, whatever positions the caller counts."""
    model, ids, question = ROTARY[name](), token_ids(2, LENGTH), token_ids(2, 5, seed=1)
    press = package.KeyRerotationPress(package.KnormPress(0.5))
    reference = DynamicCache(config=model.config)
    kept = [kept_in(layer) for layer in prefill(model, press, ids).layers]
    for index, positions in enumerate(kept):
        reference.update(*expected_turned(model, ids, positions, index), index)
    expected = model(question, past_key_values=reference).logits
    ways: list[tuple[bool, Any]] = [(True, None), (True, 30), (True, LENGTH), (False, None)]
    for inside, start in [*ways, (False, 30)]:
        positions = None if start is None else torch.arange(start, start + 5)[None]
        cache = prefill(model, press, ids)
        if inside:
            with press(model):
                logits = model(question, past_key_values=cache, position_ids=positions).logits
        else:
            logits = model(question, past_key_values=cache, position_ids=positions).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
        assert cache.get_seq_length() == 35


@both
@pytest.mark.parametrize("name", ["llama", "partial, gpt_neox"])
@torch.no_grad()
def test_generate_continues_from_the_turned_keys(package, name):
    model, ids = ROTARY[name](), token_ids(2, LENGTH)
    press = package.KeyRerotationPress(package.SnapKVPress(0.5, window_size=8))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with press(model):
        generated = model.generate(ids, **options)
    cache, by_hand = DynamicCache(config=model.config), []
    with press(model):
        logits = model(ids, past_key_values=cache).logits
        for step in range(8):
            by_hand.append(logits[:, -1:].argmax(dim=-1))
            assert cache.get_seq_length() == 30 + step
            positions = torch.full((1, 1), 30 + step)
            logits = model(by_hand[-1], past_key_values=cache, position_ids=positions).logits
    assert torch.equal(generated[:, LENGTH:], torch.cat(by_hand, dim=1))


@torch.no_grad()
def answer(model: Any, ids: Tensor, kept: list[Kept], question: Tensor) -> Tensor:
    """Logits of a question after kept keys that were turned, each layer counting for itself."""
    reference, handles, n_new = whole(model, ids), [], question.shape[1]
    turned = [expected_turned(model, ids, kept[i], i) for i in range(len(kept))]
    for states, site in zip(turned, attention_sites(model), strict=True):
        layer = reference.layers[site.layer_idx]
        layer.keys, layer.values = states
        n = layer.keys.shape[2]
        types = {"layer_type": "full_attention"} if "gemma3" in model.config.model_type else {}
        positions = torch.arange(n, n + n_new)[None]
        cos_sin = model.base_model.rotary_emb(layer.keys, positions, **types)
        future = torch.ones(n_new, n + n_new, dtype=torch.bool).triu(n + 1)
        mask = torch.zeros(1, 1, n_new, n + n_new, dtype=torch.float64).masked_fill(future, -1e30)

        def hook(_: Any, args: Any, kwargs: Any, cos_sin: Any = cos_sin, mask: Any = mask) -> Any:
            return args, {**kwargs, "position_embeddings": cos_sin, "attention_mask": mask}

        handles.append(site.module.register_forward_pre_hook(hook, with_kwargs=True))
    positions = torch.arange(ids.shape[1], ids.shape[1] + n_new)[None]
    logits = model(question, past_key_values=reference, position_ids=positions).logits
    for handle in handles:
        handle.remove()
    return logits


@both
@torch.no_grad()
def test_turned_keys_in_a_hybrid_model(package):
    """Sliding layers count on as ever, the others from their turned keys."""
    model, ids, question = make("gemma3_text"), token_ids(1, LENGTH), token_ids(1, 4, seed=1)
    press = package.KeyRerotationPress(package.KnormPress(0.5))
    cache = prefill(model, press, ids)
    kept = [kept_in(cache.layers[site.layer_idx]) for site in attention_sites(model)]
    with pytest.raises(ScopeError, match="positions"):
        model(question, past_key_values=cache)
    cache = prefill(model, press, ids)
    with press(model):
        logits = model(question, past_key_values=cache).logits
    torch.testing.assert_close(logits, answer(model, ids, kept, question), rtol=0, atol=1e-6)


@both
@torch.no_grad()
def test_layers_turned_to_different_lengths(package):
    """Each layer goes on from where its own keys end, which the model cannot know by itself."""
    model, ids, question = make(num_layers=3), token_ids(1, LENGTH), token_ids(1, 3, seed=1)
    press = package.KeyRerotationPress(
        package.PerLayerCompressionPress(package.KnormPress(), [0.5, 0.0, 0.75])
    )
    cache = prefill(model, press, ids)
    assert [layer.get_seq_length() for layer in cache.layers] == [30, 60, 15]
    kept = [kept_in(layer) for layer in cache.layers]
    with press(model):
        logits = model(question, past_key_values=cache).logits
    torch.testing.assert_close(logits, answer(model, ids, kept, question), rtol=0, atol=1e-6)
    with pytest.raises(ScopeError, match="positions"):
        model(question, past_key_values=prefill(model, press, ids))


@both
def test_turning_twice_is_turning_once(package):
    model, ids = make(), token_ids(1, LENGTH)
    once = package.KeyRerotationPress(package.KnormPress(0.5))
    caches = [prefill(model, press, ids) for press in (once, package.KeyRerotationPress(once))]
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=0, atol=1e-6)
        assert one.get_seq_length() == other.get_seq_length() == 30


@both
def test_turning_what_is_turned_in_part(package):
    """A press after the turned keys leaves gaps; turning again closes them."""
    model, ids = make(), token_ids(1, LENGTH)
    inner = package.KeyRerotationPress(package.StreamingLLMPress(0.5, n_sink=10))
    composed = package.ComposedPress([inner, package.StreamingLLMPress(0.5, n_sink=2)])
    cache = prefill(model, package.KeyRerotationPress(composed), ids)
    for index, layer in enumerate(cache.layers):
        kept = kept_in(layer)
        assert kept == [[[0, 1, *range(47, 60)]] * 2]
        expected = expected_turned(model, ids, kept, index)[0]
        torch.testing.assert_close(layer.keys, expected, rtol=0, atol=1e-6)
        assert layer.get_seq_length() == 15


# ---- each chunk by itself ------------------------------------------------------------------------

CHUNKED: dict[str, Callable[[Any], Any]] = {
    "knorm": lambda p: p.KnormPress(0.5),
    "keydiff": lambda p: p.KeyDiffPress(0.5),
    "snapkv": lambda p: p.SnapKVPress(0.5, window_size=6),
    "pyramid": lambda p: p.PyramidKVPress(0.5, window_size=4, kernel_size=3),
    "tova": lambda p: p.TOVAPress(0.5),
    "observed": lambda p: p.ObservedAttentionPress(0.5),
    "expected": lambda p: p.ExpectedAttentionPress(0.5, n_future_positions=9),
    "lagkv": lambda p: p.LagKVPress(0.5, lag_size=4),
    "streaming": lambda p: p.StreamingLLMPress(0.5),
    "critical": lambda p: p.CriticalKVPress(p.SnapKVPress(0.5, window_size=6)),
}


@both
@pytest.mark.parametrize(
    ("name", "chunk_length"),
    [*((name, 16) for name in CHUNKED), *(("snapkv", n) for n in (20, 59, 60, 1024))],
)
def test_chunks_are_pruned_as_each_alone(package, name, chunk_length):
    """In a single layer keys and queries depend on a token and its position and on nothing else."""
    model, ids, press = make(num_layers=1), token_ids(2, LENGTH), CHUNKED[name](package)
    found = kept_in(prefill(model, package.ChunkPress(press, chunk_length), ids).layers[0])
    expected: Kept = [[[], []], [[], []]]
    for start in range(0, LENGTH, chunk_length):
        stop = min(start + chunk_length, LENGTH)
        positions = torch.arange(start, stop)[None]
        alone = prefill(model, press, ids[:, start:stop], position_ids=positions).layers[0]
        for row, of_row in enumerate(kept_in(alone)):
            for head, of_head in enumerate(of_row):
                expected[row][head] += [start + p for p in of_head]
    assert found == expected


@both
def test_lengths_of_chunks(package):
    cache = prefill(
        make(), package.ChunkPress(package.KnormPress(0.5), chunk_length=20), token_ids(1, 101)
    )
    positions = kept_in(cache.layers[0])[0][0]
    assert [sum(p // 20 == chunk for p in positions) for chunk in range(6)] == [10] * 5 + [1]


# ---- whole chunks --------------------------------------------------------------------------------


def best_chunks(per_token: list[float], chunk_length: int, ratio: float) -> list[int]:
    """Tokens of the best chunks by their mean score, a shorter last chunk counting as one."""
    chunks = [
        list(range(start, min(start + chunk_length, len(per_token))))
        for start in range(0, len(per_token), chunk_length)
    ]
    means = [sum(per_token[i] for i in chunk) / len(chunk) for chunk in chunks]
    n = max(1, int(len(chunks) * (1 - ratio)))
    return [i for chosen in best(means, n) for i in chunks[chosen]]


@both
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("length", [7, 20, 45, 60])
def test_whole_chunks_are_kept(package, ratio, length):
    model, ids = make(), token_ids(3, length)
    press = package.ChunkKVPress(package.KnormPress(ratio), chunk_length=7)
    cache, full = prefill(model, press, ids), whole(model, ids)
    for layer, exact in zip(cache.layers, full.layers, strict=True):
        for row, positions in enumerate(kept_in(layer)):
            scores = [norms(keys) for keys in exact.keys[row]]
            expected = best_chunks([sum(x) for x in zip(*scores, strict=True)], 7, ratio)
            assert positions == [expected] * 2


@both
def test_chunks_by_attention(package):
    model, ids = make(), token_ids(2, LENGTH)
    cache = prefill(model, package.ChunkKVPress(package.SnapKVPress(0.5, window_size=5), 8), ids)
    for layer, (queries, keys) in zip(cache.layers, queries_and_keys(model, ids), strict=True):
        for row, positions in enumerate(kept_in(layer)):
            scores = [snapkv(queries[row, h], keys[row, h], 5) for h in range(2)]
            total = [sum(x) for x in zip(*scores, strict=True)]
            assert positions == [best_chunks(total, 8, 0.5)] * 2


@both
@pytest.mark.parametrize("padding", [[], [0, 20, 41]], ids=["even", "padded"])
def test_rows_keep_chunks_of_their_own(package, padding):
    """The shorter last chunk is in some rows' choice and not in others': rows differ in length."""
    model, length = make(), 59
    press = package.ChunkKVPress(package.KnormPress(0.4), chunk_length=9)
    if padding:
        ids, mask, positions = left_padded(3, length, padding)
        cache = prefill(model, press, ids, attention_mask=mask, position_ids=positions)
    else:
        ids, padding = token_ids(3, length), [0, 0, 0]
        cache = prefill(model, press, ids)
    lengths = set()
    for row, n in enumerate(padding):
        alone = prefill(model, press, ids[row : row + 1, n:])
        for layer, single in zip(cache.layers, alone.layers, strict=True):
            expected = [[p + n for p in head] for head in kept_in(single)[0]]
            assert kept_in(layer)[row] == expected
            lengths.add(len(expected[0]))
    assert len(lengths) > 1


# ---- block by block ------------------------------------------------------------------------------


def by_blocks(length: int, n: int, block: int, score: Callable[[list[int]], list[float]]) -> Any:
    """The winners of the competition; `score` scores the candidates it is given."""
    kept = list(range(n))
    for start in range(n, length, block):
        candidates = kept + list(range(start, min(start + block, length)))
        kept = [candidates[i] for i in best(score(candidates), n)]
    return kept


@both
@pytest.mark.parametrize("block_size", [1, 7, 16, 128])
@pytest.mark.parametrize("ratio", [0.3, 0.75])
@pytest.mark.parametrize("base", ["Knorm", "KeyDiff"])
def test_blocks_compete_with_what_is_kept(package, base, ratio, block_size):
    model, ids = make(), token_ids(2, LENGTH)
    press = package.BlockPress(package.PRESSES[f"{base}Press"](ratio), block_size)
    cache, full = prefill(model, press, ids), whole(model, ids)
    slow, n = {"Knorm": norms, "KeyDiff": cosines}[base], max(1, int(LENGTH * (1 - ratio)))

    def choose(keys: Tensor, _: Tensor) -> list[int]:
        return by_blocks(LENGTH, n, block_size, lambda candidates: slow(keys[candidates]))

    for index, layer in enumerate(cache.layers):
        assert kept_in(layer) == per_head(full, index, choose)


@both
@pytest.mark.parametrize("block_size", [5, 16])
def test_queries_follow_the_candidates_of_a_block(package, block_size):
    model, ids = make(), token_ids(2, LENGTH)
    press = package.BlockPress(package.SnapKVPress(0.6, window_size=6), block_size)
    cache = prefill(model, press, ids)
    for layer, (queries, keys) in zip(cache.layers, queries_and_keys(model, ids), strict=True):
        for row, positions in enumerate(kept_in(layer)):
            for head, found in enumerate(positions):
                q, k = queries[row, head], keys[row, head]
                expected = by_blocks(
                    LENGTH,
                    24,
                    block_size,
                    lambda some, q=q, k=k: snapkv(q[:, some], k[some], 6),
                )
                assert found == expected


@both
def test_blocks_smaller_than_what_the_press_protects(package):
    """Few candidates, all of them protected: the latest are kept, of sinks the first."""
    model, ids = make(), token_ids(1, LENGTH)
    protected = [
        (package.SnapKVPress(0.875, window_size=16), list(range(53, 60))),
        (package.ExpectedAttentionPress(0.95, n_sink=8), None),
    ]
    for press, expected in protected:
        cache = prefill(model, package.BlockPress(press, block_size=1), ids)
        n = max(1, int(LENGTH * (1 - press.compression_ratio)))
        for layer in cache.layers:
            kept = kept_in(layer)[0]
            assert [len(head) for head in kept] == [n, n]
            assert expected is None or kept == [expected] * 2


# ---- a ratio for each layer ----------------------------------------------------------------------


@both
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("base", ["Knorm", "AdaKV"])
@torch.no_grad()
def test_layers_of_different_lengths_answer_a_question(package, implementation, base):
    """As an uncompressed cache would whose heads see only what is kept."""
    dtype = torch.float32 if implementation == "eager" else torch.float64
    model = make(num_layers=4, dtype=dtype, attn_implementation=implementation)
    ids, question, ratios = token_ids(2, LENGTH), token_ids(2, 5, seed=1), [0.5, 0.0, 0.75, 0.25]
    inner = package.KnormPress()
    press = package.PerLayerCompressionPress(
        package.AdaKVPress(inner) if base == "AdaKV" else inner, ratios
    )
    assert press.compression_ratio == pytest.approx(sum(ratios) / 4)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
        lengths = [int(kept.sum()) for kept in kept_lengths(cache)]
        assert lengths == [4 * n for n in (30, 60, 15, 45)]
        visible = {index: held(layer, LENGTH) for index, layer in enumerate(cache.layers)}
        logits = [model(question, past_key_values=cache).logits]
        logits += [model(ids[:, [i]], past_key_values=cache).logits for i in range(2)]
    full = whole(model, ids)
    with seeing(model, visible):
        expected = [model(question, past_key_values=full).logits]
        expected += [model(ids[:, [i]], past_key_values=full).logits for i in range(2)]
    for one, other in zip(logits, expected, strict=True):
        atol = 1e-5 if implementation == "eager" else 1e-10
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def held(layer: Any, length: int) -> Tensor:
    """`(B, H_kv, length)` bool: what of the first tokens a layer of any kind holds."""
    if hasattr(layer, "dense"):
        positions = layer.dense()[2]
        return (positions.unsqueeze(-1) == torch.arange(length)).any(dim=2)
    return as_mask(layer, length)


@both
@pytest.mark.parametrize("ratios", [[0.5], [0.5, 0.2, 0.1], []])
def test_a_ratio_for_each_layer_and_no_more(package, ratios):
    model = make()
    before = snapshot(model)
    press = package.PerLayerCompressionPress(package.KnormPress(), ratios)
    with pytest.raises(HyperparameterError, match=f"{len(ratios)} compression_ratios .* 2 layers"):
        press.register(model)
    assert snapshot(model) == before


# ---- budgets that fall ---------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("length", "ratio", "budgets"),
    [
        (100, 0.5, [92, 71, 50, 29, 8]),
        (100, 0.8, [20] * 5),
        (40, 0.5, [32, 26, 20, 14, 8]),
        (8, 0.5, [8] * 5),
    ],
)
def test_budgets_fall_from_layer_to_layer(package, length, ratio, budgets):
    """Numbers measured of kvpress."""
    press = package.PyramidKVPress(ratio, window_size=8)
    cache = prefill(make(num_layers=5), press, token_ids(2, length))
    assert [layer.keys.shape[2] for layer in cache.layers] == budgets


@both
def test_budgets_that_fall_keep_what_snapkv_would_keep_best(package):
    model, ids = make(num_layers=3), token_ids(1, LENGTH)
    cache = prefill(model, package.PyramidKVPress(0.5, window_size=6, beta=5), ids)
    low = 30 / 5
    high = min(60 - low, LENGTH - 6)
    for index, layer in enumerate(cache.layers):
        budget = round(high - index * (high - (60 - high)) / 2)
        queries, keys = queries_and_keys(model, ids)[index]
        expected = [best(snapkv(queries[0, h], keys[0, h], 6), budget) for h in range(2)]
        assert kept_in(layer)[0] == expected


# ---- what values become --------------------------------------------------------------------------


def output_norms(model: Any, layer: int, values: Tensor, head: int) -> list[float]:
    """L1 norm of `W_o v`, mean over the query heads of a KV head; `values` `(S, d)`."""
    module = attention_sites(model)[layer].module
    projections = ("o_proj", "dense", "c_proj")
    projection = next(getattr(module, name) for name in projections if hasattr(module, name))
    weight = projection.weight if projection.weight.shape[0] == 64 else projection.weight.T
    if type(projection).__name__ == "Conv1D":
        weight = weight.T
    group = 4 // (2 if module.config.model_type == "llama" else 4)
    norms = []
    for value in values:
        sizes = []
        for member in range(group):
            start = (head * group + member) * 16
            sizes.append(float((weight[:, start : start + 16] @ value).detach().abs().sum()))
        norms.append(sum(sizes) / group)
    return norms


@both
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize(("ratio", "first", "epsilon"), [(0.5, 0.5, 1e-4), (0.8, 0.0, 0.3)])
def test_the_second_stage_weighs_values(package, family, ratio, first, epsilon):
    model, ids = make(family), token_ids(2, 40)
    press = package.CriticalKVPress(package.KeyDiffPress(ratio), epsilon, first)
    assert press.compression_ratio == ratio
    cache, full, n = prefill(model, press, ids), whole(model, ids), max(1, int(40 * (1 - ratio)))
    for index, layer in enumerate(cache.layers):
        states = full.layers[index]
        for row, positions in enumerate(kept_in(layer)):
            for head, found in enumerate(positions):
                scores = cosines(states.keys[row, head])
                weights = output_norms(model, index, states.values[row, head], head)
                weighted = [(s + epsilon) * w for s, w in zip(scores, weights, strict=True)]
                for chosen in best(scores, int(n * first)):
                    weighted[chosen] = INF
                assert found == best(weighted, n)


@both
def test_quantized_output_projections_are_refused(package):
    model = make()
    before = snapshot(model)
    projection = model.model.layers[1].self_attn.o_proj
    weight = projection.weight
    projection.weight = torch.nn.Parameter(weight.to(torch.int8), requires_grad=False)
    for press in (package.CriticalKVPress, package.CriticalAdaKVPress):
        with pytest.raises(UnsupportedModelError, match="floating-point weights"):
            press(package.KnormPress(0.5)).register(model)
    projection.weight = weight
    assert snapshot(model) == before


# ---- fewer channels ------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("window_size", [1, 8, 200])
@pytest.mark.parametrize(("ratio", "n_dropped"), [(0.3, 4), (0.8, 12), (0.97, 15), (0.01, 0)])
def test_channels_that_queries_need_least_are_zeroed(package, ratio, n_dropped, window_size):
    model, ids = make(), token_ids(2, LENGTH)
    press = package.ThinKPress(ratio, window_size)
    assert press.compression_ratio == ratio / 2
    cache, full = prefill(model, press, ids), whole(model, ids)
    seen = queries_and_keys(model, ids)
    for layer, exact, (queries, keys) in zip(cache.layers, full.layers, seen, strict=True):
        for row in range(2):
            for head in range(2):
                asking = queries[row, head, :, -window_size:].reshape(-1, 16)
                needs = [
                    sum(float(q[c]) ** 2 for q in asking)
                    / len(asking)
                    * sum(float(k[c]) ** 2 for k in keys[row, head])
                    for c in range(16)
                ]
                expected = exact.keys[row, head].clone()
                expected[:, sorted(range(16), key=needs.__getitem__)[:n_dropped]] = 0
                assert torch.equal(layer.keys[row, head], expected)
        assert torch.equal(layer.values, exact.values)
        assert layer.get_seq_length() == layer.keys.shape[2] == LENGTH


# ---- lazy layers ---------------------------------------------------------------------------------


def laziness(queries: Tensor, keys: Tensor, n_initial: int, n_recent: int, n_last: int) -> float:
    """Of one row: attention of its last queries on initial and recent tokens, mean over heads."""
    total, end = 0.0, keys.shape[1] - n_last
    for of_queries, of_keys in zip(queries, keys, strict=True):
        found = votes(of_queries[:, -n_last:], of_keys)
        total += sum(found[:n_initial]) + sum(found[end - n_recent : end])
    return total / len(keys)


@both
@pytest.mark.parametrize(("n_last", "n_kept"), [(1, 13), (8, 6)])
@torch.no_grad()
def test_each_row_of_each_layer_is_lazy_by_itself(package, n_last, n_kept):
    model, ids, question = make(num_layers=3), token_ids(3, LENGTH), token_ids(3, 4, seed=1)
    measured = [
        [laziness(q, k, 4, 10, n_last) for q, k in zip(queries, keys, strict=True)]
        for queries, keys in queries_and_keys(model, ids)
    ]
    ranked = sorted(lazy for row in measured for lazy in row)
    threshold = (ranked[4] + ranked[5]) / 2
    press = package.SimLayerKVPress(threshold, n_last, n_recent=10, n_initial=4)
    cache, full = DynamicCache(config=model.config), whole(model, ids)
    with press(model):
        model(ids, past_key_values=cache)
        n_recent = n_kept - 4
        few, everything = [*range(4), *range(LENGTH - n_recent, LENGTH)], list(range(LENGTH))
        expected = [[few if lazy > threshold else everything for lazy in row] for row in measured]
        assert [[row[0] for row in kept_in(layer)] for layer in cache.layers] == expected
        assert press.compression_ratio == pytest.approx(4 / 9 * (1 - n_kept / LENGTH))
        logits = model(question, past_key_values=cache).logits
    visible = {index: as_mask(layer, LENGTH) for index, layer in enumerate(cache.layers)}
    with seeing(model, visible):
        masked = model(question, past_key_values=full).logits
    torch.testing.assert_close(logits, masked, rtol=0, atol=1e-10)


@both
def test_a_context_of_initial_and_recent_tokens_is_left_whole(package):
    press = package.SimLayerKVPress(0.0, n_last=2, n_recent=10, n_initial=4)
    for length, n_kept in ((16, 16), (17, 12)):
        cache = prefill(make(), press, token_ids(1, length))
        assert [layer.keys.shape[2] for layer in cache.layers] == [n_kept] * 2


# ---- padded batches ------------------------------------------------------------------------------

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "composed": lambda p: p.ComposedPress(
        [p.KnormPress(0.3), p.SnapKVPress(0.4, window_size=4), p.KeyDiffPress(0.3)]
    ),
    "rerotation": lambda p: p.KeyRerotationPress(p.SnapKVPress(0.6, window_size=4)),
    "rerotated rows of different lengths": lambda p: p.KeyRerotationPress(
        p.SimLayerKVPress(0.35, n_recent=9, n_initial=2)
    ),
    "composed with turned keys": lambda p: p.ComposedPress(
        [p.KnormPress(0.3), p.KeyRerotationPress(p.KnormPress(0.3)), p.KeyDiffPress(0.3)]
    ),
    "chunk": lambda p: p.ChunkPress(p.SnapKVPress(0.5, window_size=4), chunk_length=11),
    "chunkkv": lambda p: p.ChunkKVPress(p.TOVAPress(0.5), chunk_length=7),
    "block": lambda p: p.BlockPress(p.SnapKVPress(0.5, window_size=4), block_size=9),
    "per layer": lambda p: p.PerLayerCompressionPress(
        p.ExpectedAttentionPress(n_future_positions=9), [0.7, 0.3]
    ),
    "pyramid": lambda p: p.PyramidKVPress(0.5, window_size=3, beta=4),
    "critical": lambda p: p.CriticalKVPress(p.TOVAPress(0.6)),
    "think": lambda p: p.ThinKPress(0.5, window_size=8),
    "simlayer": lambda p: p.SimLayerKVPress(0.3, n_last=2, n_recent=9, n_initial=2),
}
wrappers = pytest.mark.parametrize("name", WRAPPERS)


@both
@wrappers
@torch.no_grad()
def test_rows_of_a_padded_batch_are_those_of_the_row_alone(package, name):
    model, press = make(), WRAPPERS[name](package)
    padding, question = [0, 13, 41], token_ids(3, 5, seed=1)
    ids, mask, positions = left_padded(3, LENGTH, padding)
    cache, counted = DynamicCache(config=model.config), positions[:, -1:] + 1
    asked_in_turn = [question, question[:, :1], question[:, 1:2]]
    with press(model):
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        found = [kept_in(layer) for layer in cache.layers]
        logits = []
        for tokens in asked_in_turn:
            mask = torch.cat((mask, torch.ones_like(tokens)), dim=1)
            asked = counted + torch.arange(tokens.shape[1])
            counted = counted + tokens.shape[1]
            arguments = {"attention_mask": mask, "position_ids": asked, "past_key_values": cache}
            logits.append(model(tokens, **arguments).logits)
        for row, n in enumerate(padding):
            alone = DynamicCache(config=model.config)
            model(ids[row : row + 1, n:], past_key_values=alone)
            for layer, single in zip(found, alone.layers, strict=True):
                kept = [[p for p in head if p >= n] for head in layer[row]]
                assert kept == [[p + n for p in head] for head in kept_in(single)[0]]
            for tokens, together in zip(asked_in_turn, logits, strict=True):
                expected = model(tokens[row : row + 1], past_key_values=alone).logits
                torch.testing.assert_close(together[row], expected[0], rtol=0, atol=1e-6)


@both
@pytest.mark.parametrize("name", ["rerotation", "chunkkv", "pyramid", "simlayer", "think"])
def test_generate_in_a_padded_batch_is_generate_of_each_row(package, name):
    model, press = make("gpt_neox"), WRAPPERS[name](package)
    padding = [0, 11, 37]
    ids, mask, _ = left_padded(3, LENGTH, padding)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with press(model):
        batch = model.generate(ids, attention_mask=mask, **options)
        for row, n in enumerate(padding):
            alone = model.generate(ids[row : row + 1, n:], **options)
            assert torch.equal(alone[0, -6:], batch[row, -6:])


# ---- what a wrapper must not do, and what it does not take ---------------------------------------

OTHERS: dict[str, Callable[[Any], Any]] = {
    "adakv": lambda p: p.AdaKVPress(p.KnormPress(0.5)),
    "critical adakv": lambda p: p.CriticalAdaKVPress(p.SnapKVPress(0.5, window_size=4)),
    "dms": lambda p: p.DMSPress(p.KnormPress(0.5), -4.0, sliding_window_size=8, decoding=True),
    "decoding": lambda p: p.DecodingPress(p.SnapKVPress(0.5, window_size=4), 2, 20),
    "prefill decoding": lambda p: p.PrefillDecodingPress(
        p.ChunkKVPress(p.KnormPress(0.5), chunk_length=7), p.DecodingPress(p.KnormPress(0.5), 2, 20)
    ),
    "critical in a chunk": lambda p: p.ChunkPress(
        p.CriticalKVPress(p.PyramidKVPress(0.5, window_size=4)), chunk_length=20
    ),
    "per layer adakv": lambda p: p.PerLayerCompressionPress(
        p.AdaKVPress(p.CriticalKVPress(p.KnormPress(0.9))), [0.3, 0.6]
    ),
}
ALL = {**WRAPPERS, **OTHERS}


def described(press: Any) -> Any:
    """A press and all presses in it: which objects they are, and all that they hold."""
    if isinstance(press, (list, tuple)):
        return [described(item) for item in press]
    if not dataclasses.is_dataclass(press):
        return press
    fields = {name: x for name, x in vars(press).items() if name != "_last_scope"}
    return id(press), type(press), {name: described(x) for name, x in fields.items()}


@both
@pytest.mark.parametrize("name", ALL)
def test_presses_in_a_press_are_never_changed(package, name):
    model, press, ids = make(), ALL[name](package), token_ids(2, LENGTH)
    before, fields = described(press), dataclasses.asdict(press)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for _ in range(2):
        with press(model):
            model.generate(ids, **options)
            assert described(press) == before
    assert described(press) == before
    assert dataclasses.asdict(press) == fields
    press.compression_ratio  # noqa: B018 - reading it back changes nothing either
    assert described(press) == before


@both
def test_a_new_ratio_leaves_the_wrapped_press_as_it_was(package):
    inner = package.SnapKVPress(0.5, window_size=4)
    press = package.ChunkPress(package.CriticalKVPress(inner), chunk_length=20)
    press.compression_ratio = 0.75
    assert (press.compression_ratio, press.press.press.compression_ratio) == (0.75, 0.75)
    assert inner.compression_ratio == 0.5
    other = press.with_ratio(0.1)
    assert (press.compression_ratio, other.compression_ratio) == (0.75, 0.1)
    cache = prefill(make(), press, token_ids(1, LENGTH))
    assert cache.layers[0].keys.shape[2] == 15


def ada(p: Any) -> Any:
    return p.AdaKVPress(p.KnormPress(0.5))


def decoding(p: Any) -> Any:
    return p.DecodingPress(p.KnormPress())


SCORES = r"scores tokens \(a ScorerPress or CriticalKVPress\)"
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "adakv in chunk": (lambda p: p.ChunkPress(ada(p)), SCORES),
    "adakv in chunkkv": (lambda p: p.ChunkKVPress(ada(p)), SCORES),
    "adakv in block": (lambda p: p.BlockPress(ada(p)), SCORES),
    "adakv in critical": (lambda p: p.CriticalKVPress(ada(p)), SCORES),
    "adakv in adakv": (lambda p: p.AdaKVPress(ada(p)), SCORES),
    "adakv in dms": (lambda p: p.DMSPress(ada(p), 0.0), SCORES),
    "adakv in decoding": (lambda p: p.DecodingPress(ada(p)), f"base_press must be .*{SCORES}"),
    "adakv in rerotation": (lambda p: p.KeyRerotationPress(ada(p)), "as many tokens of each head"),
    "adakv first": (lambda p: p.ComposedPress([ada(p), p.KnormPress()]), "must be .* is the last"),
    "dms first": (
        lambda p: p.ComposedPress([p.DMSPress(p.KnormPress(), 0.0), p.KnormPress()]),
        "must be .* is the last",
    ),
    "adakv before decoding": (
        lambda p: p.PrefillDecodingPress(ada(p), decoding(p)),
        "prefilling_press must be .*heads of one length",
    ),
    "no press to compose": (lambda p: p.ComposedPress([]), "at least one press"),
    "not even a list": (lambda p: p.ComposedPress(None), "presses must be"),
    "a press, not a list": (lambda p: p.ComposedPress(p.KnormPress()), "presses must be"),
    "decoding in composed": (
        lambda p: p.ComposedPress([p.KnormPress(), decoding(p)]),
        "act after the prefill",
    ),
    "decoding in rerotation": (lambda p: p.KeyRerotationPress(decoding(p)), "after the prefill"),
    "decoding in chunk": (lambda p: p.ChunkPress(decoding(p)), SCORES),
    "decoding in per layer": (
        lambda p: p.PerLayerCompressionPress(decoding(p), [0.5]),
        "after the prefill",
    ),
    "decoding in decoding": (lambda p: p.DecodingPress(decoding(p)), SCORES),
    "decoding for the prefill": (
        lambda p: p.PrefillDecodingPress(decoding(p), None),
        "prefilling_press must be .*after the prefill",
    ),
    "streaming in composed": (
        lambda p: p.ComposedPress([p.StreamingLLMDecodingPress()]),
        "act after the prefill",
    ),
    "streaming in rerotation": (
        lambda p: p.KeyRerotationPress(p.StreamingLLMDecodingPress()),
        "after the prefill",
    ),
    "dms while decoding in composed": (
        lambda p: p.ComposedPress([p.DMSPress(p.KnormPress(), 0.0, decoding=True)]),
        "act after the prefill",
    ),
    "a scorer for decoding": (
        lambda p: p.PrefillDecodingPress(None, p.KnormPress()),
        "decoding_press must be a DecodingPress",
    ),
    "streaming for decoding": (
        lambda p: p.PrefillDecodingPress(None, p.StreamingLLMDecodingPress()),
        "decoding_press must be a DecodingPress",
    ),
    "no threshold": (lambda p: p.DMSPress(p.KnormPress(), None), "threshold must be a number"),
    "no number": (
        lambda p: p.DMSPress(p.KnormPress(), float("nan")),
        "threshold must be a number",
    ),
    "window": (lambda p: p.DMSPress(p.KnormPress(), 0.0, 0), "sliding_window_size must be"),
    "snapkv of one token": (
        lambda p: p.DMSPress(p.SnapKVPress(), 0.0, decoding=True),
        "press must be|decoding must be",
    ),
    "alpha": (lambda p: p.AdaKVPress(p.KnormPress(), 1.5), r"alpha_safeguard must be .*\[0, 1\]"),
    "epsilon": (lambda p: p.CriticalKVPress(p.KnormPress(), -1.0), "epsilon must be 0 or more"),
    "stage": (
        lambda p: p.CriticalAdaKVPress(p.KnormPress(), first_stage_ratio=2.0),
        r"first_stage_ratio must be .*\[0, 1\]",
    ),
    "no chunks": (lambda p: p.ChunkPress(p.KnormPress(), 0), "chunk_length must be"),
    "no whole chunks": (lambda p: p.ChunkKVPress(p.KnormPress(), 0), "chunk_length must be"),
    "no blocks": (lambda p: p.BlockPress(p.KnormPress(), 0), "block_size must be"),
    "ratio": (
        lambda p: p.PerLayerCompressionPress(p.KnormPress(), [0.5, 1.0]),
        r"compression_ratios must be numbers in \[0, 1\)",
    ),
    "one ratio": (
        lambda p: p.PerLayerCompressionPress(p.KnormPress(), 0.5),
        "compression_ratios must be",
    ),
    "ratio of a press without": (
        lambda p: p.PerLayerCompressionPress(p.SimLayerKVPress(), [0.5, 0.5]),
        "SimLayerKVPress cannot be told a compression ratio",
    ),
    "channels at new positions": (
        lambda p: p.KeyRerotationPress(p.ThinKPress(0.5)),
        "as many tokens of each head",
    ),
    "channels freed first": (
        lambda p: p.ComposedPress([p.ThinKPress(0.5, free_memory=True), p.KnormPress()]),
        "must be|is the last",
    ),
    "never": (
        lambda p: p.DecodingPress(p.KnormPress(), 0),
        "compression_interval must be .*1 or more",
    ),
    "nothing": (lambda p: p.DecodingPress(p.KnormPress(), 1, 0), "target_size must be .*1 or more"),
    "no queries": (
        lambda p: p.DecodingPress(p.TOVAPress(), hidden_states_buffer_size=0),
        "hidden_states_buffer_size must be .*1 or more",
    ),
    "not a press": (lambda p: p.ChunkPress("knorm"), "press must be a press installed by"),
    "nothing at all": (lambda p: p.AdaKVPress(None), "press must be a press installed by"),
    "laziness": (lambda p: p.SimLayerKVPress(1.5), r"lazy_threshold must be .*\[0, 1\]"),
    "recent": (lambda p: p.SimLayerKVPress(n_last=8, n_recent=8), "n_recent must be .*n_last=8"),
    "capacity": (
        lambda p: p.StreamingLLMDecodingPress(max_capacity=4, n_sink=4),
        "max_capacity must be .*above n_sink=4",
    ),
    "beta": (lambda p: p.PyramidKVPress(beta=0), "beta must be .*1 or more"),
    "all channels": (lambda p: p.ThinKPress(1.0), r"key_channel_compression_ratio must be"),
}


@both
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_when_it_is_made(package, name):
    make_press, allowed = REFUSED[name]
    with pytest.raises(HyperparameterError, match=allowed):
        make_press(package)


AROUND: dict[str, Callable[[Any, Any], Any]] = {
    "chunk": lambda p, inner: p.ChunkPress(inner),
    "composed": lambda p, inner: p.ComposedPress([p.KnormPress(), inner]),
    "decoding": lambda p, inner: p.DecodingPress(inner),
    "prefilling": lambda p, inner: p.PrefillDecodingPress(inner),
    "per layer": lambda p, inner: p.PerLayerCompressionPress(inner, [0.5]),
    "adakv": lambda p, inner: p.AdaKVPress(inner),
    "dms": lambda p, inner: p.DMSPress(inner, 0.0),
    "rerotation": lambda p, inner: p.KeyRerotationPress(inner),
}


@both
@pytest.mark.parametrize("name", AROUND)
def test_a_press_of_the_other_mechanism_is_refused(package, name):
    other = patch_impl if package is hooks_impl else hooks_impl
    mechanism = package.KnormPress.mechanism
    with pytest.raises(HyperparameterError, match=f"a press installed by {mechanism}"):
        AROUND[name](package, other.KnormPress(0.5))
    AROUND[name](package, package.KnormPress(0.5))


@both
def test_a_press_that_became_invalid_is_refused_when_its_wrapper_opens(package):
    model, inner = make(), package.KnormPress(0.5)
    press = package.ChunkPress(package.CriticalKVPress(inner))
    before = snapshot(model)
    inner.compression_ratio = 2.0
    with pytest.raises(HyperparameterError, match=r"compression_ratio=2.0"):
        press.register(model)
    assert snapshot(model) == before
