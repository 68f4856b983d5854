"""Presses made of presses, and those that prune in a way of their own, against slow references."""

import sys
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

from experiments.questions.architectures.decoders import build as build_tiny
from experiments.questions.architectures.decoders import decoders
from press_core import ScopeError, UnsupportedInputError, attention_sites
from tests.presses import listed, presses_of
from tests.slow import INF, best, choices, cosines, norms, queries_and_keys, snapkv
from tests.support import both, filled, held, left_padded, make, nested, rotating, token_ids
from tests.twins import contents, same

LENGTH = 60


# ---- what is kept --------------------------------------------------------------------------------


def by(score, n):
    return lambda queries, keys: best(score(keys), n)


def by_window(window, n):
    return lambda queries, keys: best(snapkv(queries, keys, window), n)


def after(first, second):
    """The second sees what the first has left, with the queries of those tokens."""

    def choose(queries, keys):
        left = first(queries, keys)
        return [left[i] for i in second(queries[:, left], keys[left])]

    return choose


def by_blocks(n, block, choose):
    """Winners of a competition of each block with those of the blocks before."""

    def chosen(queries, keys):
        kept = list(range(n))
        for start in range(n, len(keys), block):
            some = kept + list(range(start, min(start + block, len(keys))))
            kept = [some[i] for i in choose(queries[:, some], keys[some])]
        return kept

    return chosen


def in_blocks(n):
    chosen = by_blocks(24, n, by_window(6, 24))
    return lambda p: p.BlockPress(p.SnapKVPress(0.6, window_size=6), n), chosen


COMPOSED = {
    "keys, then queries": (
        lambda p: p.ComposedPress([p.KnormPress(0.4), p.SnapKVPress(0.5, window_size=6)]),
        after(by(norms, 36), by_window(6, 18)),
    ),
    "blocks of 5, queries": in_blocks(5),
    "blocks of 16, queries": in_blocks(16),
}
"""Presses, and which positions a head keeps, of its queries `(G, S, d)` and its keys `(S, d)`."""


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("name", COMPOSED)
def test_what_presses_of_presses_keep(package, family, name):
    """Each has the keys, queries and positions of what those before it have left."""
    model, ids, (press, choose) = make(family), token_ids(2, LENGTH), COMPOSED[name]
    found = held(filled(model, press(package), ids))
    for kept, states in zip(found, queries_and_keys(model, ids), strict=True):
        assert kept == choices(states, choose)


@presses_of("pairs")
def test_a_composition_its_parts_and_nested_scopes_leave_the_same(package, make_press):
    """However deep they are composed, and of padded rows; of scopes the inner one acts first."""
    model, question = make(), token_ids(2, 3, seed=1)
    first, second = make_press(package)
    ids, mask, positions = left_padded(2, LENGTH, [11, 0])
    more, found = torch.cat((mask, torch.ones_like(question)), dim=1), []
    for scopes in (
        [package.ComposedPress([first, second])],
        [package.ComposedPress([package.ComposedPress([first, package.ComposedPress([second])])])],
        [second, first],
    ):
        cache = DynamicCache(config=model.config)
        with nested(*scopes)(model):
            model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions)
            logits = model(question, past_key_values=cache, attention_mask=more).logits
        found.append((cache, logits))
    (expected, answered), *others = found
    for cache, logits in others:
        assert torch.equal(logits, answered)
        assert held(cache) == held(expected)
        assert same(contents(cache), contents(expected))


# ---- chunks --------------------------------------------------------------------------------------

CHUNKED = listed("chunked")


@pytest.mark.parametrize(
    ("name", "chunk_length"),
    [*((name, 16) for name in CHUNKED), *(("snapkv", n) for n in (20, 59, 60, 1024))],
)
def test_chunks_are_pruned_as_each_alone(package, name, chunk_length):
    """In a single layer keys and queries depend on a token and its position and on nothing else."""
    model, ids, press = make(num_layers=1), token_ids(2, LENGTH), CHUNKED[name](package)
    (found,) = held(filled(model, package.ChunkPress(press, chunk_length), ids))
    expected = [[[], []], [[], []]]
    for start in range(0, LENGTH, chunk_length):
        stop = min(start + chunk_length, LENGTH)
        positions = torch.arange(start, stop)[None]
        (alone,) = held(filled(model, press, ids[:, start:stop], position_ids=positions))
        for row, of_row in enumerate(alone):
            for head, of_head in enumerate(of_row):
                expected[row][head] += [start + p for p in of_head]
    assert found == expected


# ---- what values become --------------------------------------------------------------------------


def output_norms(model, layer, values, head):
    """L1 norm of `W_o v`, mean over the query heads of a KV head; `values` `(S, d)`."""
    module = attention_sites(model)[layer].module
    projections = ("o_proj", "dense", "c_proj")
    projection = next(getattr(module, name) for name in projections if hasattr(module, name))
    weight = projection.weight.T if type(projection).__name__ == "Conv1D" else projection.weight
    group = 4 // (2 if module.config.model_type == "llama" else 4)
    parts = [weight[:, (head * group + i) * 16 :][:, :16] for i in range(group)]
    return [sum(float((part @ v).abs().sum()) for part in parts) / group for v in values]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize(("ratio", "first", "epsilon"), [(0.5, 0.5, 1e-4), (0.8, 0.0, 0.3)])
def test_the_second_stage_weighs_values(package, family, ratio, first, epsilon):
    model, ids = make(family), token_ids(2, 40)
    press = package.CriticalKVPress(package.KeyDiffPress(ratio), epsilon, first)
    assert press.compression_ratio == ratio
    cache, full, n = filled(model, press, ids), filled(model, None, ids), int(40 * (1 - ratio))
    for index, (kept, states) in enumerate(zip(held(cache), full.layers, strict=True)):
        for row, positions in enumerate(kept):
            for head, found in enumerate(positions):
                scores = cosines(states.keys[row, head])
                weights = output_norms(model, index, states.values[row, head], head)
                weighted = [(s + epsilon) * w for s, w in zip(scores, weights, strict=True)]
                for chosen in best(scores, int(n * first)):
                    weighted[chosen] = INF
                assert found == best(weighted, n)


def test_what_the_first_stage_keeps_can_be_averaged(package):
    """A chunk of which it keeps both tokens is better than any of which it keeps one.

    Among themselves, these tokens are in the order of their scores.
    """

    class Half(package.KeyDiffPress):
        def score(self, call):  # differences are beyond float16
            return (super().score(call).argsort().argsort() * 3e3 - 6e4).half()

    model, ids, press = make(num_kv_heads=1), token_ids(1, 40), Half(0.5)
    critical = package.CriticalKVPress(press, first_stage_ratio=1.0)
    chunks = package.ChunkKVPress(critical, 2)

    def see(call):
        assert torch.equal(*(each.score(call).argsort()[..., -20:] for each in (press, critical)))

    filled(model, package.BasePress.collector(see), ids)
    first, kept = (held(filled(model, each, ids)) for each in (press, chunks))
    for ((best_ones,),), ((found,),) in zip(first, kept, strict=True):
        assert {p for p in best_ones if p ^ 1 in best_ones} <= set(found)


# ---- keys at new positions -----------------------------------------------------------------------


def modeling_of(model):
    return sys.modules[type(attention_sites(model)[0].module).__module__]


def keys_before_rope(model, ids):
    """Per layer that attends to everything, what the model gave its rotary function as keys."""
    modeling = modeling_of(model)
    rotate, given = modeling.apply_rotary_pos_emb, []

    def watch(query, key, *args, **kwargs):
        given.append(key)
        return rotate(query, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "apply_rotary_pos_emb", watch)
        filled(model, None, ids)
    return [given[site.layer_idx] for site in attention_sites(model)]


def expected_turned(model, ids, kept, layer):
    """Kept keys as if they were tokens `0 ... n - 1`, and kept values, `(B, H_kv, n, d)`."""
    states = filled(model, None, ids).layers[attention_sites(model)[layer].layer_idx]
    index = torch.tensor(kept).unsqueeze(-1)
    keys, values = (x.take_along_dim(index, dim=2) for x in (states.keys, states.values))
    before = keys_before_rope(model, ids)[layer].take_along_dim(index, dim=2)
    positions = torch.arange(index.shape[2])[None]
    cos, sin = model.base_model.rotary_emb(before, positions, **layer_type(model))
    turned = modeling_of(model).apply_rotary_pos_emb(before, before, cos, sin)[1]
    return torch.cat((turned, keys[..., turned.shape[-1] :]), dim=-1), values


def layer_type(model):
    return {"layer_type": "full_attention"} if "gemma3" in model.config.model_type else {}


def yarn():
    """A Llama whose rotary embedding scales attention."""
    model = rotating(make(), "yarn", original_max_position_embeddings=64)
    assert model.base_model.rotary_emb.attention_scaling > 1.1
    return model


ROTARY = "llama", "partial, gpt_neox", "partial, stablelm", "neighbours, cohere", "scaled, yarn"


@pytest.mark.parametrize("name", ROTARY)
def test_kept_keys_are_turned_to_the_first_positions(package, name):
    """Later ones continue from them, in the scope and after it, whatever the caller counts."""
    model = yarn() if "yarn" in name else make(name.split(", ")[-1])
    ids, question = token_ids(2, LENGTH), token_ids(2, 5, seed=1)
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
        with press(model) if inside else nullcontext():
            logits = model(question, past_key_values=cache, **given).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
        assert cache.get_seq_length() == 35


@both
@pytest.mark.parametrize("case", ["behind windows", "before windows", "to different lengths"])
def test_turned_keys_that_the_model_cannot_count(package, case):
    """Each layer goes on from where its own keys end, with the help of a scope.

    Of the most recent tokens alone all distances stay, so that nothing else changes, up to the
    rounding of rotary tables in float32.
    """
    ids, question = token_ids(1, LENGTH), token_ids(1, 4, seed=1)
    recent = package.StreamingLLMPress(0.5, n_sink=0)
    if case == "to different lengths":
        recent = package.PerLayerCompressionPress(recent, [0.5, 0.0, 0.75])
    model = make("gemma3_text") if case == "behind windows" else make(num_layers=3)
    if case == "before windows":
        model = build_tiny(decoders()["qwen2 (sliding)"]).double()
    press, logits = package.KeyRerotationPress(recent), []
    turned = filled(model, press, ids)
    if case == "to different lengths":
        assert [layer.get_seq_length() for layer in turned.layers] == [30, 60, 15]
    with pytest.raises(ScopeError, match="positions"):
        model(question, past_key_values=filled(model, press, ids))
    for scope, cache in ((press, turned), (recent, filled(model, recent, ids))):
        with scope(model):
            logits.append(model(question, past_key_values=cache).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=4e-6 if "before" in case else 1e-6)


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


@both
def test_turned_keys_are_not_kept_head_by_head(package):
    """No layer of heads of different lengths can tell where later tokens continue."""
    model, outer = make(), package.AdaKVPress(package.KnormPress(0.3))
    inner = package.KeyRerotationPress(package.KnormPress(0.5))
    refused = pytest.raises(UnsupportedInputError, match="rerotates")
    with outer(model), inner(model), refused:
        filled(model, None, token_ids(1, LENGTH))


@both
def test_entropy_gated_chunks_of_a_context_shorter_than_one(package):
    """Every head keeps the same tokens, as in longer contexts (and in kvpress)."""
    press = package.EntropyGatedChunkKVPress(package.KnormPress(0.5), chunk_length=50)
    for ((found, *others),) in held(filled(make(), press, token_ids(1, 40))):
        assert len(found) == 20
        assert others == [found] * len(others) != []
