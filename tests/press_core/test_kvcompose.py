"""KVCompose against loops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

import hooks_impl
from press_core import Tokens, kept_lengths
from tests.press_core.replayed import float64_llama, read, weights
from tests.support import build, token_ids

LENGTH = 9
MEAN = {"max": max, "mean": lambda xs: sum(xs) / len(xs)}


def slow_scores(model: Any, ids: Tensor, press: Any) -> list[list[list[float]]]:
    """By layer, KV head and token."""
    n, reading = len(ids), read(model, ids, ids)
    task, group = MEAN[press.agg_task], MEAN[press.agg_group]
    found = []
    for layer in range(2):
        of_head = [
            [weights(model, reading, layer, h, q, n, range(2 * n)) for q in range(n)]
            for h in range(4)
        ]
        scores = [
            [
                group([task([of_head[h][q][key] for q in range(n)]) for h in heads])
                for key in range(n)
            ]
            for heads in ((0, 1), (2, 3))
        ]
        if press.add_v_norm:
            values = reading[1].layers[layer].values[0]
            scores = [
                [s * float(v.square().sum()) ** 0.5 for s, v in zip(row, values[i], strict=False)]
                for i, row in enumerate(scores)
            ]
        if press.add_mean_across_heads:
            mean = [(a + b) / 2 for a, b in zip(*scores, strict=True)]
            scores = [[s + m for s, m in zip(row, mean, strict=True)] for row in scores]
        found.append(scores)
    return found


AGGREGATIONS = list(itertools.product(("max", "mean"), ("max", "mean")))


@pytest.mark.parametrize(("task", "group"), AGGREGATIONS)
@pytest.mark.parametrize("options", [(False, True), (True, False), (True, True)])
def test_scores_are_what_a_second_reading_pays_to_each_key(task, group, options):
    model, ids = float64_llama(), token_ids(1, LENGTH)
    norm, mean = options
    press = hooks_impl.KVComposePress(
        0.5, agg_task=task, agg_group=group, add_v_norm=norm, add_mean_across_heads=mean
    )
    found = torch.stack([layer[0] for layer in press.scores(model, ids)])
    expected = torch.tensor(slow_scores(model, ids[0], press), dtype=torch.float64)
    # Cosines and sines of the model are float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_reading_in_parts_is_one_reading(monkeypatch):
    model, ids, press = float64_llama(), token_ids(1, 41), hooks_impl.KVComposePress(0.5)
    whole = press.scores(model, ids)
    monkeypatch.setattr("press_core.replay.kvcompose.AT_A_TIME", 7)
    for one, other in zip(whole, press.scores(model, ids), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


# ---- which tokens --------------------------------------------------------------------------------


def drawn(n_layers: int, n_heads: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Some layers and heads matter more than others.
    scale = torch.rand(n_layers, n_heads, 1, generator=generator, dtype=torch.float64)
    numbers = torch.rand(n_layers, n_heads, length, generator=generator, dtype=torch.float64)
    return numbers * (0.2 + scale)


def slow_budgets(scores: Tensor, press: Any, budget: int) -> list[int]:
    """Composite tokens of all layers in one list, the best of them kept."""
    head = MEAN[press.agg_head]
    curves = []
    for layer in scores.tolist():
        in_order = [sorted(row, reverse=True) for row in layer]
        curves.append([head(list(rank)) for rank in zip(*in_order, strict=True)])
    curves[0] = [max(rank) for rank in zip(*curves, strict=True)]
    bound = max(1, press.keep_token_lower_bound)
    ranked = [
        (rank >= bound, -value, index)
        for index, curve in enumerate(curves)
        for rank, value in enumerate(curve)
    ]
    chosen = [index for *_, index in sorted(ranked)[:budget]]
    return [max(chosen.count(index), bound) for index in range(len(curves))]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("agg_head", ["max", "mean"])
@pytest.mark.parametrize("bound", [0, 5])
def test_composite_tokens_of_all_layers_compete(seed, agg_head, bound):
    scores = drawn(4, 3, 20, seed)
    press = hooks_impl.KVComposePress(0.6, agg_head=agg_head, keep_token_lower_bound=bound)
    chosen = press.choose({layer: of_layer[None] for layer, of_layer in enumerate(scores)})
    expected = slow_budgets(scores, press, 32)
    assert sum(expected) == 32
    assert expected[0] == max(expected)
    assert min(expected) >= bound
    for layer, n in enumerate(expected):
        for head in range(3):
            best = sorted(range(20), key=lambda t: -float(scores[layer, head, t]))[:n]
            assert chosen[layer][head].nonzero().flatten().tolist() == sorted(best)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bound", [0, 4])
def test_heads_compete_where_nothing_is_aligned(seed, bound):
    scores = drawn(4, 3, 20, seed)
    press = hooks_impl.KVComposePress(0.6, structured=False, keep_token_lower_bound=bound)
    chosen = press.choose({layer: of_layer[None] for layer, of_layer in enumerate(scores)})
    ranked = []
    for layer, head in itertools.product(range(4), range(3)):
        in_order = sorted(range(20), key=lambda t: -float(scores[layer, head, t]))
        for rank, token in enumerate(in_order):
            first = rank < max(1, bound)
            ranked.append((not first, -float(scores[layer, head, token]), layer, head, token))
    expected = {entry[2:] for entry in sorted(ranked)[:96]}
    found = {
        (layer, *place)
        for layer, mask in chosen.items()
        for place in map(tuple, mask.nonzero().tolist())
    }
    assert found == expected


def test_a_bound_above_the_budget_counts_more():
    scores = {layer: of_layer[None] for layer, of_layer in enumerate(drawn(3, 2, 10, 0))}
    for structured in (True, False):
        press = hooks_impl.KVComposePress(0.9, structured, keep_token_lower_bound=4)
        assert all(bool((mask.sum(dim=-1) >= 4).all()) for mask in press.choose(scores).values())


def test_a_number_of_tokens_is_the_mean_over_layers():
    model, cache = build("llama", num_layers=3), DynamicCache()
    with torch.no_grad(), hooks_impl.KVComposePress(Tokens(11))(model):
        model(token_ids(1, 40), past_key_values=cache)
    lengths = [int(layer[0, 0]) for layer in kept_lengths(cache)]
    assert sum(lengths) == 33
    assert lengths[0] == max(lengths)


# ---- memory --------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The size of the largest tensor that anything makes."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return made


@torch.no_grad()
def test_there_is_no_attention_matrix(monkeypatch):
    """Twice the context takes twice the memory, not four times."""
    monkeypatch.setattr("press_core.replay.kvcompose.AT_A_TIME", 64)
    model, sizes = build("llama", num_layers=1), []
    for length in (512, 1024, 2048):
        with Largest() as largest:
            hooks_impl.KVComposePress(0.5).scores(model, token_ids(1, length))
        sizes.append(largest.numbers)
    assert sizes[2] <= 2.05 * sizes[1] <= 4.2 * sizes[0]
    assert sizes[2] < 2048 * 2048 / 2
