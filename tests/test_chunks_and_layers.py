"""Chunks, budgets by layer, second stages, channels, lazy layers, against slow references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from press_core import HyperparameterError, UnsupportedModelError, attention_sites, kept_lengths
from tests.slow import INF, best, choices, cosines, norms, queries_and_keys, snapkv, votes
from tests.support import both, filled, held, left_padded, snapshot, token_ids
from tests.test_wrappers import LENGTH, make

# ---- chunks --------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("name", "chunk_length"),
    [*((name, 16) for name in CHUNKED), *(("snapkv", n) for n in (20, 59, 60, 1024))],
)
def test_chunks_are_pruned_as_each_alone(package, name, chunk_length):
    """In a single layer keys and queries depend on a token and its position and on nothing else."""
    model, ids, press = make(num_layers=1), token_ids(2, LENGTH), CHUNKED[name](package)
    (found,) = held(filled(model, package.ChunkPress(press, chunk_length), ids))
    expected: list[Any] = [[[], []], [[], []]]
    for start in range(0, LENGTH, chunk_length):
        stop = min(start + chunk_length, LENGTH)
        positions = torch.arange(start, stop)[None]
        (alone,) = held(filled(model, press, ids[:, start:stop], position_ids=positions))
        for row, of_row in enumerate(alone):
            for head, of_head in enumerate(of_row):
                expected[row][head] += [start + p for p in of_head]
    assert found == expected


def best_chunks(scores: list[list[float]], chunk_length: int, ratio: float) -> list[int]:
    """Tokens of the best chunks by the mean over their tokens, of the sum over heads."""
    per_token = [sum(x) for x in zip(*scores, strict=True)]
    chunks = [
        list(range(start, min(start + chunk_length, len(per_token))))
        for start in range(0, len(per_token), chunk_length)
    ]
    means = [sum(per_token[i] for i in chunk) / len(chunk) for chunk in chunks]
    n = max(1, int(len(chunks) * (1 - ratio)))
    return [i for chosen in best(means, n) for i in chunks[chosen]]


@pytest.mark.parametrize("inner", ["KnormPress", "SnapKVPress"])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("length", [7, 20, 45, 60])
def test_whole_chunks_are_kept(package, inner, ratio, length):
    model, ids = make(), token_ids(3, length)
    fields = {"window_size": 5} if inner == "SnapKVPress" else {}
    press = package.ChunkKVPress(package.PRESSES[inner](ratio, **fields), chunk_length=7)
    found = held(filled(model, press, ids))
    for kept, (queries, keys) in zip(found, queries_and_keys(model, ids), strict=True):
        for row, positions in enumerate(kept):
            scores = [norms(of_head) for of_head in keys[row]]
            if inner == "SnapKVPress":
                scores = [snapkv(*x, 5) for x in zip(queries[row], keys[row], strict=True)]
            assert positions == [best_chunks(scores, 7, ratio)] * 2


@pytest.mark.parametrize("padding", [[0, 0, 0], [0, 20, 41]], ids=["even", "padded"])
def test_rows_keep_chunks_of_their_own(package, padding):
    """The shorter last chunk is in some rows' choice and not in others': rows differ in length."""
    model, (ids, mask, positions) = make(), left_padded(3, 59, padding)
    press = package.ChunkKVPress(package.KnormPress(0.4), chunk_length=9)
    together = held(filled(model, press, ids, attention_mask=mask, position_ids=positions))
    for row, n in enumerate(padding):
        alone = held(filled(model, press, ids[row : row + 1, n:]))
        for layer, single in zip(together, alone, strict=True):
            assert layer[row] == [[p + n for p in head] for head in single[0]]
    assert len({len(row[0]) for layer in together for row in layer}) > 1


# ---- budgets by layer ----------------------------------------------------------------------------


@both
@pytest.mark.parametrize("ratios", [[0.5], [0.5, 0.2, 0.1], []])
def test_a_ratio_for_each_layer_and_no_more(package, ratios):
    model = make()
    before = snapshot(model)
    press = package.PerLayerCompressionPress(package.KnormPress(), ratios)
    with pytest.raises(HyperparameterError, match=f"{len(ratios)} compression_ratios .* 2 layers"):
        press.register(model)
    assert snapshot(model) == before


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
    """Numbers measured of kvpress; what is kept is what SnapKV would keep best."""
    model, ids = make(num_layers=5), token_ids(1, length)
    found = held(filled(model, package.PyramidKVPress(ratio, window_size=8), ids))
    states = queries_and_keys(model, ids)
    for kept, of_layer, budget in zip(found, states, budgets, strict=True):
        assert kept == choices(of_layer, lambda q, k, n=budget: best(snapkv(q, k, 8), n))


# ---- what values become --------------------------------------------------------------------------


def output_norms(model: Any, layer: int, values: Tensor, head: int) -> list[float]:
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


@both
@pytest.mark.parametrize("name", ["CriticalKVPress", "CriticalAdaKVPress"])
def test_quantized_output_projections_are_refused(package, name):
    model = make()
    projection = model.model.layers[1].self_attn.o_proj
    codes = projection.weight.to(torch.int8)
    projection.weight = torch.nn.Parameter(codes, requires_grad=False)
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match="floating-point weights"):
        package.PRESSES[name](package.KnormPress(0.5)).register(model)
    assert snapshot(model) == before


# ---- fewer channels ------------------------------------------------------------------------------


@pytest.mark.parametrize("window_size", [1, 8, 200])
@pytest.mark.parametrize(("ratio", "n_dropped"), [(0.3, 4), (0.8, 12), (0.97, 15), (0.01, 0)])
def test_channels_that_queries_need_least_are_zeroed(package, ratio, n_dropped, window_size):
    model, ids = make(), token_ids(2, LENGTH)
    press = package.ThinKPress(ratio, window_size)
    assert press.compression_ratio == ratio / 2
    cache, full = filled(model, press, ids), filled(model, None, ids)
    seen = queries_and_keys(model, ids)
    for layer, exact, (queries, keys) in zip(cache.layers, full.layers, seen, strict=True):
        for row, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
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


def laziness(queries: Tensor, keys: Tensor, n_last: int) -> float:
    """Of one row: mean over heads of the attention on 4 initial and 10 recent tokens."""
    total, end = 0.0, keys.shape[1] - n_last
    for of_queries, of_keys in zip(queries, keys, strict=True):
        found = votes(of_queries[:, -n_last:], of_keys)
        total += sum(found[:4]) + sum(found[end - 10 : end])
    return total / len(keys)


@pytest.mark.parametrize(("n_last", "n_kept"), [(1, 13), (8, 6)])
def test_each_row_of_each_layer_is_lazy_by_itself(package, n_last, n_kept):
    model, ids = make(num_layers=3), token_ids(3, LENGTH)
    measured = [
        [laziness(q, k, n_last) for q, k in zip(queries, keys, strict=True)]
        for queries, keys in queries_and_keys(model, ids)
    ]
    ranked = sorted(lazy for row in measured for lazy in row)
    press = package.SimLayerKVPress((ranked[4] + ranked[5]) / 2, n_last, n_recent=10, n_initial=4)
    found = held(filled(model, press, ids))
    few, whole = [*range(4), *range(LENGTH - n_kept + 4, LENGTH)], list(range(LENGTH))
    expected = [[few if lazy > ranked[4] else whole for lazy in row] for row in measured]
    assert [[row[0] for row in kept] for kept in found] == expected
    assert press.compression_ratio == pytest.approx(4 / 9 * (1 - n_kept / LENGTH))


def test_a_context_of_initial_and_recent_tokens_is_left_whole(package):
    press = package.SimLayerKVPress(0.0, n_last=2, n_recent=10, n_initial=4)
    for length, n_kept in ((16, 16), (17, 12)):
        kept = kept_lengths(filled(make(), press, token_ids(1, length)))
        assert [int(layer.max()) for layer in kept] == [n_kept] * 2
