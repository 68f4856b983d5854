"""KVgrad against loops, and gradients against differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hooks_impl
import patch_impl
from press_core.replay.kvzip import RepeatPrompts
from tests.press_core.replayed import float64_llama, read, weights
from tests.support import token_ids

PROMPTS = RepeatPrompts(first=(3, 4), following=(6, 7), suffix=(8,))
LENGTH, CHUNK, N_SINK = 13, 8, 2


@torch.no_grad()
def slow_sensitivities(model: Any, context: Tensor, then: Tensor) -> list[list[float]]:
    """By layer and token of `then`: how fast the last states' squared norms change, by differences.

    `sqrt(sum_i (d Phi / d a_i)^2)`, the attention output moved in every channel there and back.
    """
    step, width, change = 1e-4, model.config.hidden_size, None

    def move(layer: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> Any:
            if change is None or change[0] != layer:
                return None
            moved = output[0].clone()
            # Rows of the batch are moved apart: row 2 i up, row 2 i + 1 down in channel i.
            for channel in range(width):
                moved[2 * channel, change[1], channel] += step
                moved[2 * channel + 1, change[1], channel] -= step
            return moved, *output[1:]

        return hook

    last: list[Tensor] = []
    layers = model.model.layers
    handles = [layer.self_attn.register_forward_hook(move(i)) for i, layer in enumerate(layers)]
    handles.append(model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0])))
    found = []
    for layer in range(len(layers)):
        of_tokens = []
        for token in range(len(then)):
            cache, change = DynamicCache(config=model.config), None
            model(context.expand(2 * width, -1), past_key_values=cache)
            change = layer, token
            last.clear()
            model(then.expand(2 * width, -1), past_key_values=cache)
            objective = last[0].square().sum(dim=(1, 2))
            slopes = (objective[::2] - objective[1::2]) / (2 * step)
            of_tokens.append(float(slopes.square().sum()) ** 0.5)
        found.append(of_tokens)
    for handle in handles:
        handle.remove()
    return found


def slow_scores(model: Any, ids: Tensor) -> Tensor:
    """`(L, H_kv, S)`."""
    n, found = len(ids), torch.zeros(2, 2, LENGTH, dtype=torch.float64)
    previous: list[int] | None = None
    for start in range(0, n, CHUNK):
        chunk = ids[start : start + CHUNK].tolist()
        asking = [3, 4] if previous is None else [6, 7, *previous]
        then = torch.tensor([*asking, 8, *chunk])
        previous = chunk[-8:]
        reading, slopes = read(model, ids, then), slow_sensitivities(model, ids, then)
        sinks = range(min(N_SINK, start))
        repeated = range(start, start + len(chunk))
        seen = [*sinks, *repeated, *range(n, n + len(then))]
        for layer in range(2):
            attention = model.model.layers[layer].self_attn
            d, out = attention.head_dim, attention.o_proj.weight.detach()
            for head in range(4):
                for query in range(len(then)):
                    paid = weights(model, reading, layer, head, query, n, seen)
                    for key in repeated:
                        value = reading[1].layers[layer].values[0, head // 2, key]
                        written = float((out[:, head * d : (head + 1) * d] @ value).norm())
                        score = paid[key] * written * slopes[layer][query]
                        if score > found[layer, head // 2, key]:
                            found[layer, head // 2, key] = score
    return found


@pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
@pytest.mark.parametrize("frozen", [False, True])
def test_scores_are_what_keys_write_times_what_that_matters(package, frozen):
    model, ids = float64_llama(head_dim=4), token_ids(1, LENGTH)
    model.requires_grad_(not frozen)
    press = package.KVgradPress(0.5, n_sink=N_SINK, chunk_size=CHUNK, prompts=PROMPTS)
    found = torch.stack([layer[0] for layer in press.scores(model, ids)])
    expected = slow_scores(model, ids[0])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_the_slow_gradient_is_no_plain_norm():
    """Otherwise the test above could not tell the gradient from a constant."""
    model, ids = float64_llama(head_dim=4), token_ids(1, LENGTH)
    slopes = slow_sensitivities(model, ids[0], ids[0, :5])
    for of_layer in slopes:
        assert max(of_layer) > 1.05 * min(of_layer)
