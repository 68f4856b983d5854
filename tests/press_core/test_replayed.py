"""Second readings of a context, worked out slowly: queries, keys and weights one by one."""

import itertools
import math
from functools import partial

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hooks_impl
import patch_impl
from press_core.replay.kvzip import RepeatPrompts
from tests.press_core.drawn import rotated
from tests.support import build, token_ids


def read(model, context, then):
    """Run a context `(S,)`, and then what comes after it `(m,)`."""
    cache, inputs = DynamicCache(config=model.config), []
    model(context[None], past_key_values=cache)
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kwargs: inputs.append(kwargs["hidden_states"][0]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    model(then[None], past_key_values=cache)
    for handle in handles:
        handle.remove()
    return inputs, cache


def weights(model, reading, layer, head, query, length, seen):
    """What one query of one head pays to each of the keys `seen`, before itself.

    Args:
        query: which token of what was read after the context of `length` tokens.
    """
    inputs, cache = reading
    attention, keys = model.model.layers[layer].self_attn, cache.layers[layer].keys[0]
    d, group = attention.head_dim, attention.num_key_value_groups
    projected = attention.q_proj.weight.detach()[head * d : (head + 1) * d] @ inputs[layer][query]
    turned = rotated(projected, length + query)
    visible = [key for key in seen if key <= length + query]
    logits = [float(turned @ keys[head // group, key]) / math.sqrt(d) for key in visible]
    largest = max(logits)
    terms = [math.exp(logit - largest) for logit in logits]
    return {key: term / sum(terms) for key, term in zip(visible, terms, strict=True)}


def float64_llama(**options):
    """Two layers, four query and two KV heads; norms that do not round to float32."""
    model = build("llama", dtype=torch.float64, **options)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = partial(_norm, module)
    return model


def _norm(module, states):
    scale = (states.square().mean(dim=-1, keepdim=True) + module.variance_epsilon).rsqrt()
    return module.weight * states * scale


# ---- KVgrad, and gradients against differences ---------------------------------------------------

PROMPTS = RepeatPrompts(first=(3, 4), following=(6, 7), suffix=(8,))
CONTEXT, CHUNK, N_SINK = 13, 8, 2


def slow_sensitivities(model, context, then):
    """By layer and token of `then`: how fast the last states' squared norms change, by differences.

    `sqrt(sum_i (d Phi / d a_i)^2)`, the attention output moved in every channel there and back.
    """
    step, width, change = 1e-4, model.config.hidden_size, None

    def move(layer):
        def hook(_, __, output):
            if change is None or change[0] != layer:
                return None
            moved = output[0].clone()
            # Rows of the batch are moved apart: row 2 i up, row 2 i + 1 down in channel i.
            for channel in range(width):
                moved[2 * channel, change[1], channel] += step
                moved[2 * channel + 1, change[1], channel] -= step
            return moved, *output[1:]

        return hook

    last = []
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
    assert all(max(layer) > 1.05 * min(layer) for layer in found)  # no constant would do
    return found


def slow_kvgrad(model, ids):
    """`(L, H_kv, S)`."""
    n, found = len(ids), torch.zeros(2, 2, CONTEXT, dtype=torch.float64)
    previous = None
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


@pytest.mark.parametrize(("package", "frozen"), [(hooks_impl, False), (patch_impl, True)])
def test_kvgrad_is_what_keys_write_times_what_that_matters(package, frozen):
    model, ids = float64_llama(head_dim=4), token_ids(1, CONTEXT)
    model.requires_grad_(not frozen)
    press = package.KVgradPress(0.5, n_sink=N_SINK, chunk_size=CHUNK, prompts=PROMPTS)
    found = torch.stack([layer[0] for layer in press.scores(model, ids)])
    expected = slow_kvgrad(model, ids[0])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_queries_whose_hidden_states_are_zero_decide_nothing():
    model, ids = float64_llama(), token_ids(1, CONTEXT)
    model.model.embed_tokens.weight.data[ids[0, 5]] = 0
    press = hooks_impl.KVzipPress(kvzip_plus_normalization=True, prompts=PROMPTS)
    assert torch.stack(press.scores(model, ids)).isfinite().all()


# ---- KVCompose -----------------------------------------------------------------------------------

LENGTH = 9
MEAN = {"max": max, "mean": lambda xs: sum(xs) / len(xs)}


def slow_kvcompose(model, ids, press):
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
    expected = torch.tensor(slow_kvcompose(model, ids[0], press), dtype=torch.float64)
    # Cosines and sines of the model are float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_reading_in_parts_is_one_reading(monkeypatch):
    model, ids, press = float64_llama(), token_ids(1, 41), hooks_impl.KVComposePress(0.5)
    whole = press.scores(model, ids)
    monkeypatch.setattr("press_core.replay.rows.AT_A_TIME", 7)
    torch.testing.assert_close(whole, press.scores(model, ids), rtol=0, atol=1e-12)


# ---- which tokens --------------------------------------------------------------------------------


def uneven(n_layers, n_heads, length, seed):
    generator = torch.Generator().manual_seed(seed)
    # Some layers and heads matter more than others.
    scale = torch.rand(n_layers, n_heads, 1, generator=generator, dtype=torch.float64)
    numbers = torch.rand(n_layers, n_heads, length, generator=generator, dtype=torch.float64)
    return numbers * (0.2 + scale)


def slow_budgets(scores, press, budget):
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
    scores = uneven(4, 3, 20, seed)
    press = hooks_impl.KVComposePress(0.6, agg_head=agg_head, keep_token_lower_bound=bound)
    chosen = press.choose(scores)
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
    scores = uneven(4, 3, 20, seed)
    press = hooks_impl.KVComposePress(0.6, structured=False, keep_token_lower_bound=bound)
    chosen = press.choose(scores)
    ranked = []
    for layer, head in itertools.product(range(4), range(3)):
        in_order = sorted(range(20), key=lambda t: -float(scores[layer, head, t]))
        for rank, token in enumerate(in_order):
            first = rank < max(1, bound)
            ranked.append((not first, -float(scores[layer, head, token]), layer, head, token))
    expected = {entry[2:] for entry in sorted(ranked)[:96]}
    found = {
        (layer, *place)
        for layer, mask in enumerate(chosen)
        for place in map(tuple, mask.nonzero().tolist())
    }
    assert found == expected
