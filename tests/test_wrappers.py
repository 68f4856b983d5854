"""Presses made of presses, and those that prune in a way of their own, against slow references."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from press_core import ScopeError, attention_sites
from tests.slow import INF, best, choices, cosines, norms, queries_and_keys, snapkv
from tests.support import both, build, filled, held, token_ids

LENGTH = 60


def make(family: str = "llama", num_layers: int = 2, **options: Any) -> Any:
    """In float64, so that a rounding error decides no top-k."""
    return build(family, num_layers=num_layers, **{"dtype": torch.float64, **options})


# ---- what is kept --------------------------------------------------------------------------------

Choose = Callable[[Tensor, Tensor], list[int]]
"""The positions that a head keeps, of its queries `(G, S, d)` and its keys `(S, d)`."""


def by(score: Callable[[Tensor], list[float]], n: int) -> Choose:
    return lambda queries, keys: best(score(keys), n)


def by_window(window: int, n: int) -> Choose:
    return lambda queries, keys: best(snapkv(queries, keys, window), n)


def after(first: Choose, second: Choose) -> Choose:
    """The second sees what the first has left, with the queries of those tokens."""

    def choose(queries: Tensor, keys: Tensor) -> list[int]:
        left = first(queries, keys)
        return [left[i] for i in second(queries[:, left], keys[left])]

    return choose


def by_blocks(n: int, block: int, choose: Choose) -> Choose:
    """Winners of a competition of each block with those of the blocks before."""

    def chosen(queries: Tensor, keys: Tensor) -> list[int]:
        kept = list(range(n))
        for start in range(n, len(keys), block):
            some = kept + list(range(start, min(start + block, len(keys))))
            kept = [some[i] for i in choose(queries[:, some], keys[some])]
        return kept

    return chosen


COMPOSED: dict[str, tuple[Callable[[Any], Any], Choose]] = {
    "keys, then keys": (
        lambda p: p.ComposedPress([p.KnormPress(0.4), p.KeyDiffPress(0.5)]),
        after(by(norms, 36), by(cosines, 18)),
    ),
    "keys, then queries": (
        lambda p: p.ComposedPress([p.KnormPress(0.4), p.SnapKVPress(0.5, window_size=6)]),
        after(by(norms, 36), by_window(6, 18)),
    ),
    "nested": (
        lambda p: p.ComposedPress(
            [p.KnormPress(0.4), p.ComposedPress([p.KeyDiffPress(0.5), p.SnapKVPress(0.5, 4)])]
        ),
        after(after(by(norms, 36), by(cosines, 18)), by_window(4, 9)),
    ),
    **{
        f"blocks of {block}, {name} {n}": (
            lambda p, block=block, name=name, n=n: p.BlockPress(
                p.PRESSES[name](1 - n / LENGTH), block
            ),
            by_blocks(n, block, by(score, n)),
        )
        for name, score in (("KnormPress", norms), ("KeyDiffPress", cosines))
        for block, n in ((1, 15), (7, 42), (16, 15), (128, 42))
    },
    **{
        f"blocks of {block}, queries": (
            lambda p, block=block: p.BlockPress(p.SnapKVPress(0.6, window_size=6), block),
            by_blocks(24, block, by_window(6, 24)),
        )
        for block in (5, 16)
    },
}


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("name", COMPOSED)
def test_what_presses_of_presses_keep(package, family, name):
    """Each has the keys, queries and positions of what those before it have left."""
    model, ids, (press, choose) = make(family), token_ids(2, LENGTH), COMPOSED[name]
    found = held(filled(model, press(package), ids))
    for kept, states in zip(found, queries_and_keys(model, ids), strict=True):
        assert kept == choices(states, choose)


def test_composed_presses_act_in_order(package):
    model = make()
    many, few = package.StreamingLLMPress(0.5, n_sink=10), package.StreamingLLMPress(0.5, n_sink=2)
    # many keeps 0..9 and 40..59; few keeps 0, 1 and 32..59
    expected = [
        ([many, few], [0, 1, *range(47, 60)]),
        ([few, many], [0, 1, *range(32, 40), *range(55, 60)]),
    ]
    for presses, positions in expected:
        cache = filled(model, package.ComposedPress(presses), token_ids(2, LENGTH))
        assert held(cache) == [[[positions] * 2] * 2] * 2


def test_queries_and_positions_follow_keys_that_are_turned(package):
    """After KeyRerotationPress the next press judges a context of tokens `0 ... n - 1`."""
    model, ids = make(), token_ids(1, LENGTH)
    first = package.KeyRerotationPress(package.StreamingLLMPress(0.5, n_sink=10))
    press = package.ComposedPress([first, package.SnapKVPress(0.5, window_size=6)])
    left = [*range(10), *range(40, 60)]
    rotary, turn = model.base_model.rotary_emb, rotate_function(model)

    def turned(states: Tensor) -> Tensor:
        """From the positions that tokens had to `0 ... n - 1`."""
        back, to = (rotary(states, torch.tensor([x])) for x in (left, range(30)))
        states = turn(states, states, back[0], -back[1])[0]
        return turn(states, states, *to)[0]

    found = held(filled(model, press, ids))
    for kept, (queries, keys) in zip(found, queries_and_keys(model, ids), strict=True):
        queries = turned(queries[:, :, :, left].flatten(1, 2)).unflatten(1, (2, -1))
        chosen = choices((queries, turned(keys[:, :, left])), by_window(6, 15))
        assert kept == [[[left[i] for i in head] for head in row] for row in chosen]


PAIRS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
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
    "rerotation, knorm": lambda p: (p.KeyRerotationPress(p.KeyDiffPress(0.4)), p.KnormPress(0.5)),
    "knorm, rerotation": lambda p: (p.KnormPress(0.4), p.KeyRerotationPress(p.KeyDiffPress(0.5))),
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


@pytest.mark.parametrize("name", PAIRS)
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


def test_a_head_wise_press_may_come_last(package):
    """Heads share the budget of AdaKV, of which each has one token for sure."""
    model, ids = make(), token_ids(2, LENGTH)
    ada = package.AdaKVPress(package.KeyDiffPress(0.5), alpha_safeguard=0.1)
    found = held(filled(model, package.ComposedPress([package.KnormPress(0.5), ada]), ids))
    for kept, layer in zip(found, filled(model, None, ids).layers, strict=True):
        for row, of_row in zip(kept, layer.keys, strict=True):
            first = [best(norms(keys), 30) for keys in of_row]
            scores = [cosines(keys[left]) for keys, left in zip(of_row, first, strict=True)]
            for of_head in scores:
                of_head[best(of_head, 1)[0]] = INF  # int(15 * 0.1)
            chosen = best(scores[0] + scores[1], 30)
            assert row == [[first[h][i - 30 * h] for i in chosen if i // 30 == h] for h in (0, 1)]


# ---- keys at new positions -----------------------------------------------------------------------


def rotate_function(model: Any) -> Any:
    module = attention_sites(model)[0].module
    return sys.modules[type(module).__module__].apply_rotary_pos_emb


def keys_before_rope(model: Any, ids: Tensor) -> list[Tensor]:
    """Per layer that attends to everything, what the model gave its rotary function as keys."""
    modeling: Any = sys.modules[type(attention_sites(model)[0].module).__module__]
    rotate, given = modeling.apply_rotary_pos_emb, []

    def watch(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append(key)
        return rotate(query, key, *args, **kwargs)

    modeling.apply_rotary_pos_emb = watch
    try:
        filled(model, None, ids)
    finally:
        modeling.apply_rotary_pos_emb = rotate
    return [given[site.layer_idx] for site in attention_sites(model)]


def expected_turned(model: Any, ids: Tensor, kept: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Kept keys as if they were tokens `0 ... n - 1`, and kept values, `(B, H_kv, n, d)`."""
    states = filled(model, None, ids).layers[attention_sites(model)[layer].layer_idx]
    index = torch.tensor(kept).unsqueeze(-1)
    keys, values = (x.take_along_dim(index, dim=2) for x in (states.keys, states.values))
    before = keys_before_rope(model, ids)[layer].take_along_dim(index, dim=2)
    positions = torch.arange(index.shape[2])[None]
    cos, sin = model.base_model.rotary_emb(before, positions, **layer_type(model))
    turned = rotate_function(model)(before, before, cos, sin)[1]
    return torch.cat((turned, keys[..., turned.shape[-1] :]), dim=-1), values


def layer_type(model: Any) -> dict[str, str]:
    return {"layer_type": "full_attention"} if "gemma3" in model.config.model_type else {}


def yarn() -> Any:
    """A Llama whose rotary embedding scales attention."""
    config = make().config
    config.rope_parameters = {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
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


@pytest.mark.parametrize("name", ROTARY)
def test_kept_keys_are_turned_to_the_first_positions(package, name):
    """Later ones continue from them, in the scope and after it, whatever the caller counts."""
    model, ids, question = ROTARY[name](), token_ids(2, LENGTH), token_ids(2, 5, seed=1)
    press = package.KeyRerotationPress(package.KnormPress(0.5))
    cache, reference = filled(model, press, ids), DynamicCache(config=model.config)
    full = [(layer.values, layer.keys) for layer in filled(model, None, ids).layers]
    for index, (layer, kept) in enumerate(zip(cache.layers, held(cache), strict=True)):
        assert kept == choices(full[index], lambda _, keys: best(norms(keys), 30))
        keys, values = expected_turned(model, ids, kept, index)
        torch.testing.assert_close(layer.keys, keys, rtol=0, atol=1e-6)  # tables are float32
        assert torch.equal(layer.values, values)
        assert layer.get_seq_length() == 30
        reference.update(keys, values, index)
    expected = model(question, past_key_values=reference).logits
    for inside, start in ((True, None), (True, 30), (True, LENGTH), (False, None), (False, 30)):
        positions = None if start is None else torch.arange(start, start + 5)[None]
        cache, given = filled(model, press, ids), {"position_ids": positions}
        scope = press.register(model) if inside else None
        logits = model(question, past_key_values=cache, **given).logits
        if scope is not None:
            scope.remove()
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
        assert cache.get_seq_length() == 35


def answer(model: Any, ids: Tensor, kept: list[Any], question: Tensor) -> Tensor:
    """Logits of a question after kept keys that were turned, each layer counting for itself."""
    reference, handles, n_new = filled(model, None, ids), [], question.shape[1]
    turned = [expected_turned(model, ids, kept[i], i) for i in range(len(kept))]
    for states, site in zip(turned, attention_sites(model), strict=True):
        layer = reference.layers[site.layer_idx]
        layer.keys, layer.values = states
        n = layer.keys.shape[2]
        positions = torch.arange(n, n + n_new)[None]
        cos_sin = model.base_model.rotary_emb(layer.keys, positions, **layer_type(model))
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
@pytest.mark.parametrize("case", ["beside layers that slide", "to different lengths"])
def test_turned_keys_that_the_model_cannot_count(package, case):
    """Each layer goes on from where its own keys end, with the help of a scope."""
    ids, question, inner = token_ids(1, LENGTH), token_ids(1, 4, seed=1), package.KnormPress(0.5)
    if case == "to different lengths":
        inner = package.PerLayerCompressionPress(package.KnormPress(), [0.5, 0.0, 0.75])
    model = make("gemma3_text") if case == "beside layers that slide" else make(num_layers=3)
    press = package.KeyRerotationPress(inner)
    cache = filled(model, press, ids)
    if case == "to different lengths":
        assert [layer.get_seq_length() for layer in cache.layers] == [30, 60, 15]
    kept = [held(cache)[site.layer_idx] for site in attention_sites(model)]
    with pytest.raises(ScopeError, match="positions"):
        model(question, past_key_values=filled(model, press, ids))
    with press(model):
        logits = model(question, past_key_values=cache).logits
    torch.testing.assert_close(logits, answer(model, ids, kept, question), rtol=0, atol=1e-6)


def test_turning_what_is_turned(package):
    """A press after the turned keys leaves gaps; turning again closes them."""
    model, ids = make(), token_ids(1, LENGTH)
    inner = package.KeyRerotationPress(package.StreamingLLMPress(0.5, n_sink=10))
    composed = package.ComposedPress([inner, package.StreamingLLMPress(0.5, n_sink=2)])
    for press, positions in (
        (package.KeyRerotationPress(composed), [0, 1, *range(47, 60)]),
        (package.KeyRerotationPress(inner), [*range(10), *range(40, 60)]),
    ):
        cache = filled(model, press, ids)
        assert held(cache) == [[[positions] * 2]] * 2
        for index, layer in enumerate(cache.layers):
            expected = expected_turned(model, ids, held(cache)[index], index)[0]
            torch.testing.assert_close(layer.keys, expected, rtol=0, atol=1e-6)
            assert layer.get_seq_length() == len(positions)
