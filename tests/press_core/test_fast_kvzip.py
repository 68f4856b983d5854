"""Fast KVzip against plain Python, and the learning of its gates."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from press_core import AttentionCall, HyperparameterError, PressError, Tokens, attention_sites
from press_core.calibration import CalibrationError
from press_core.examples import Examples
from press_core.presses.fast_kvzip import FastKVzip, Gate, KVzipGates, fit_gates
from tests.support import build

LAYERS, HEADS, KV_HEADS, D, WIDTH, RANK, N_BASE = 2, 6, 3, 8, 48, 5, 4
LENGTH = 31


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gates() -> KVzipGates:
    return KVzipGates(
        drawn(LAYERS, HEADS, RANK, WIDTH),
        drawn(LAYERS, HEADS, RANK, seed=1),
        drawn(LAYERS, KV_HEADS, RANK, WIDTH, seed=2),
        1 + drawn(LAYERS, RANK, seed=3) / 4,
        1 + drawn(LAYERS, RANK, seed=4) / 4,
        drawn(LAYERS, KV_HEADS, N_BASE, RANK, seed=5),
        drawn(LAYERS, HEADS, seed=6),
    )


def a_call(batch: int = 2, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> Any:
    model = build("llama", num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=D)
    return AttentionCall(
        site=attention_sites(model)[1],
        hidden_states=drawn(batch, length, WIDTH, seed=7).to(dtype),
        keys=drawn(batch, KV_HEADS, length, D, seed=8).to(dtype),
        values=drawn(batch, KV_HEADS, length, D, seed=9).to(dtype),
    )


def slow_gate(given: KVzipGates, layer: int, head: int, state: list[float]) -> float:
    """The formula of the paper for one token and KV head, number by number."""

    def rms(vector: list[float], weight: list[float]) -> list[float]:
        mean = math.fsum(x * x for x in vector) / len(vector)
        return [w * x / math.sqrt(mean + 1e-6) for w, x in zip(weight, vector, strict=True)]

    def dot(one: list[float], other: list[float]) -> float:
        return math.fsum(x * y for x, y in zip(one, other, strict=True))

    group = HEADS // KV_HEADS
    key = [dot(row, state) for row in given.key_weight[layer, head].tolist()]
    key = rms(key, given.key_norm[layer].tolist())
    found = []
    for query_head in range(head * group, (head + 1) * group):
        weight, bias = given.query_weight[layer, query_head], given.query_bias[layer, query_head]
        query = [dot(row, state) + b for row, b in zip(weight.tolist(), bias.tolist(), strict=True)]
        query = rms(query, given.query_norm[layer].tolist())
        logit = dot(key, query) / math.sqrt(RANK) + float(given.bias[layer, query_head])
        base = [dot(row, query) / math.sqrt(RANK) for row in given.base[layer, head].tolist()]
        found.append(1 / (1 + math.fsum(math.exp(b - logit) for b in base)))
    return math.fsum(found) / group


def test_a_gate_is_the_formula_of_the_paper() -> None:
    call, given = a_call(), gates()
    press = FastKVzip(0.5, n_sink=0, window_ratio=0, gates=given)
    scores = press.scores(call)
    assert scores.shape == (2, KV_HEADS, LENGTH)
    for row in range(2):
        for token in range(LENGTH):
            state = call.hidden_states[row, token].tolist()
            expected = [slow_gate(given, 1, head, state) for head in range(KV_HEADS)]
            assert scores[row, :, token].tolist() == pytest.approx(expected)


def test_long_contexts_are_scored_in_parts() -> None:
    call, press = a_call(1, 2500), FastKVzip(0.5, n_sink=0, window_ratio=0, gates=gates())
    whole = gates().of_layer(1)(call.hidden_states)
    torch.testing.assert_close(press.scores(call), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_probabilities_whatever_the_states(dtype: torch.dtype, scale: float) -> None:
    states = (a_call().hidden_states * scale).to(dtype)
    steep = gates().of_layer(0)._replace(bias=1000 * drawn(HEADS))  # exp overflows
    for gate in (gates().of_layer(0), steep):
        told = gate(states)
        assert told.dtype == torch.float32
        assert bool(((told >= 0) & (told <= 1)).all())


def test_states_that_are_no_numbers_are_refused() -> None:
    call = a_call()
    call.hidden_states[1, 3, 0] = float("inf")
    with pytest.raises(PressError, match="says NaN of some tokens"):
        FastKVzip(0.5, gates=gates()).scores(call)


def test_scores_follow_the_keys_that_are_left() -> None:
    call, press = a_call(), FastKVzip(0.5, n_sink=0, window_ratio=0, gates=gates())
    positions = torch.rand(2, KV_HEADS, LENGTH).topk(7).indices.sort().values
    left = press.scores(call.select(positions))
    torch.testing.assert_close(left, press.scores(call).gather(-1, positions))


@pytest.mark.parametrize(
    ("length", "window"), [(10, 0), (99, 1), (100, 2), (31_999, 639), (32_000, 4096)]
)
def test_the_window_is_a_share_of_short_contexts(length: int, window: int) -> None:
    assert FastKVzip(0.5).window(length) == window


def test_sinks_and_window_stay_above_all_others() -> None:
    call = a_call()
    press = FastKVzip(0.5, n_sink=3, window_ratio=0.2, gates=gates())
    scores = press.scores(call)
    protected = [0, 1, 2, *range(LENGTH - 6, LENGTH)]
    others = [token for token in range(LENGTH) if token not in protected]
    assert float(scores[..., others].max()) < float(scores[..., protected].min())
    assert torch.equal(scores[0, 0, protected], scores[1, 2, protected])


# ---- budgets -------------------------------------------------------------------------------------


def slow_choice(scores: list[Tensor], n: int) -> list[list[set[int]]]:
    """The best token of each head, then the best of all heads of all layers."""
    heads = [(layer, head) for layer in range(len(scores)) for head in range(len(scores[layer]))]
    best = {(i, h): int(scores[i][h].argmax()) for i, h in heads}
    rest = [
        (float(scores[i][h, token]), i, h, token)
        for i, h in heads
        for token in range(scores[i].shape[1])
        if token != best[i, h]
    ]
    kept = [[{best[i, h]} for h in range(len(scores[i]))] for i in range(len(scores))]
    for _, i, h, token in sorted(rest, reverse=True)[: n - len(heads)]:
        kept[i][h].add(token)
    return kept


@pytest.mark.parametrize("ratio", [0.01, 0.33, 0.5, 0.9, 0.97, 0.999])
@pytest.mark.parametrize("lengths", [(40, 40, 40), (40, 12, 25)])
def test_heads_of_all_layers_share_a_budget(ratio: float, lengths: tuple[int, ...]) -> None:
    """Layers may differ in length, where another press acted before."""
    scores = [drawn(KV_HEADS, n, seed=i).sigmoid() for i, n in enumerate(lengths)]
    chosen = FastKVzip(ratio).choose(scores)
    size = KV_HEADS * sum(lengths)
    n = max(KV_HEADS * len(lengths), size - int(size * ratio))
    assert sum(int(layer.sum()) for layer in chosen) == n
    found = [[set(head.nonzero()[:, 0].tolist()) for head in layer] for layer in chosen]
    assert found == slow_choice(scores, n)


@pytest.mark.parametrize("tokens", [1, 7, 40, 50])
def test_a_number_of_tokens_is_met_on_average(tokens: int) -> None:
    scores = [drawn(KV_HEADS, n).sigmoid() for n in (40, 12)]
    chosen = FastKVzip(Tokens(tokens)).choose(scores)
    expected = KV_HEADS * (min(tokens, 40) + min(tokens, 12))
    assert sum(int(layer.sum()) for layer in chosen) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_sink", -1), ("window_size", -1), ("window_ratio", 1.1), ("gates", 3)],
)
def test_fields_outside_of_their_range(field: str, value: Any) -> None:
    with pytest.raises(HyperparameterError, match=rf"FastKVzip\({field}="):
        FastKVzip(**{field: value})


# ---- learning ------------------------------------------------------------------------------------


def examples(target: Gate, n: int = 600) -> Examples:
    """States whose scores a gate tells."""
    learned = Examples(10_000)
    call = a_call(1, n, torch.float32)
    learned.see(call)
    learned.label([torch.zeros(0), target(call.hidden_states)])
    return learned


def test_gates_learn_what_a_gate_says() -> None:
    target = Gate(*(x.float() for x in gates().of_layer(0)))
    learned = examples(target)
    states = learned.states[1][0][None]
    before = fit_gates(learned, RANK, N_BASE, 0, 0).of_layer(1)(states)
    given = fit_gates(learned, RANK, N_BASE, 600, 0)
    after, wanted = given.of_layer(1)(states), target(states)
    assert given.sizes == {"layers": 2, "heads": 6, "kv_heads": 3, "hidden_size": WIDTH}
    assert float((after - wanted).square().mean()) < 0.1 * float(wanted.var())
    assert float((before - wanted).square().mean()) > 0.5 * float(wanted.var())
    torch.testing.assert_close(before.mean(dim=-1), wanted.mean(dim=-1), atol=0.15, rtol=0)


def test_the_same_seed_learns_the_same() -> None:
    learned = examples(Gate(*(x.float() for x in gates().of_layer(0))), 80)
    state = torch.get_rng_state()
    one, two, other = (fit_gates(learned, 2, 2, 10, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, two.tensors[name])
    assert not torch.equal(one.base, other.base)


def test_learning_works_where_gradients_are_off() -> None:
    learned = examples(Gate(*(x.float() for x in gates().of_layer(0))), 80)
    with torch.inference_mode():
        given = fit_gates(learned, 2, 2, 5, 0)
    assert given.base.dtype == torch.float32
    assert not given.base.requires_grad
    assert not given.base.is_inference()


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(CalibrationError, match="no token"):
        fit_gates(Examples(10), 2, 2, 5, 0)


# ---- files ---------------------------------------------------------------------------------------


def same(one: KVzipGates, two: KVzipGates) -> bool:
    return all(torch.equal(x, two.tensors[name]) for name, x in one.tensors.items())


def test_saved_gates_are_read_again(tmp_path: Path) -> None:
    path = gates().save(tmp_path)
    assert path.name == "fast_kvzip_gates.safetensors"
    assert same(KVzipGates.load(tmp_path), gates())


def test_gates_in_the_names_of_those_that_are_published(tmp_path: Path) -> None:
    """As `docs/learned.md` says how to turn the published pickle into safetensors."""
    given, tensors = gates(), dict[str, Tensor]()
    for i in range(LAYERS):
        parts = {
            "q_proj.weight": given.query_weight[i].flatten(0, 1),
            "q_proj.bias": given.query_bias[i].flatten(),
            "k_proj.weight": given.key_weight[i].flatten(0, 1),
            "q_norm.weight": given.query_norm[i],
            "k_norm.weight": given.key_norm[i],
            "k_base": given.base[i].unsqueeze(1),
            "b": given.bias[i].view(KV_HEADS, 1, -1),
        }
        tensors |= {f"layers.{i}.{name}": x.contiguous() for name, x in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert same(KVzipGates.load(tmp_path), given)


@pytest.mark.parametrize("name", ["gate.pt", "owner/gate.bin"])
def test_pickles_are_refused(name: str) -> None:
    with pytest.raises(CalibrationError, match=f"{re.escape(repr(name))} is a pickle"):
        KVzipGates.load(name)


def test_shapes_that_do_not_fit_are_named() -> None:
    parts = dict(gates().tensors)
    for name, tensor in parts.items():
        with pytest.raises(CalibrationError, match=rf"{name} \(.*they must be query_weight \(L"):
            KVzipGates(**{**parts, name: tensor[..., :-1]})
        with pytest.raises(CalibrationError, match="they must be"):
            KVzipGates(**{**parts, name: tensor[0]})
