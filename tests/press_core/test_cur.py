"""CurDKV against plain Python, and its properties."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hooks_impl
import patch_impl
from experiments.testbed.compare import Inputs, compare
from press_core import HyperparameterError
from press_core.presses.cur import CUR, cur_scores
from press_core.presses.leverage_score import sketch
from press_core.select import top_positions
from tests.support import build

TYPES = ("key", "value", "kv_avg", "kv_product")


def _states(
    seed: int = 0, length: int = 23, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 3, length, 8, generator=generator, dtype=torch.float64)
    return keys.to(dtype), values.to(dtype)


Vector = list[float]


def _leverage(states: list[Vector], press: CUR, projection: list[Vector]) -> Vector:
    """Squared norms, each divided by the sum of its window."""
    if press.use_random_leverage:
        states = [
            [math.fsum(x * p for x, p in zip(row, column, strict=True)) for column in projection]
            for row in states
        ]
    squares = [math.fsum(x * x for x in row) for row in states]
    if not press.use_local_approximation:
        return squares
    width, shares = press.local_window_size, []
    for position, square in enumerate(squares):
        start = position - position % width
        shares.append(square / math.fsum(squares[start : start + width]))
    return shares


def _expected(keys: list[Vector], values: list[Vector], press: CUR) -> Vector:
    projection = sketch((8, 20), 1, torch.zeros(1).double()).T.tolist()
    pairs = zip(*(_leverage(x, press, projection) for x in (keys, values)), strict=True)
    combined = [
        {"key": k, "value": v, "kv_avg": (k + v) / 2, "kv_product": k * v}[press.leverage_type]
        for k, v in pairs
    ]
    return [x / math.fsum(combined) for x in combined]


@pytest.mark.parametrize("width", [1, 5, 23, 64])
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("leverage_type", TYPES)
def test_scores_are_shares_of_squared_norms(
    leverage_type: Any, random: bool, local: bool, width: int
) -> None:
    press = CUR(0.5, 4, leverage_type, random, local, width)
    keys, values = _states()
    scores = cur_scores(keys, values, press, 1)
    for row in range(2):
        for head in range(3):
            expected = _expected(keys[row, head].tolist(), values[row, head].tolist(), press)
            torch.testing.assert_close(
                scores[row, head, 4:], torch.tensor(expected[4:]).double(), atol=1e-9, rtol=1e-7
            )
            assert scores[row, head, :4].min() > scores[row, head, 4:].max()


@pytest.mark.parametrize("leverage_type", TYPES)
def test_the_scores_of_a_head_sum_to_one(leverage_type: Any) -> None:
    press = CUR(num_sinks=0, leverage_type=leverage_type)
    totals = cur_scores(*_states(), press, 0).sum(dim=-1)
    torch.testing.assert_close(totals, torch.ones_like(totals))


@pytest.mark.parametrize("leverage_type", TYPES)
@pytest.mark.parametrize("local", [True, False])
def test_the_units_of_keys_and_values_do_not_count(leverage_type: Any, local: bool) -> None:
    press = CUR(leverage_type=leverage_type, use_local_approximation=local)
    keys, values = _states()
    units = (3, 3) if leverage_type == "kv_avg" and not local else (1000, 0.01)
    scores = cur_scores(units[0] * keys, units[1] * values, press, 0)
    torch.testing.assert_close(scores, cur_scores(keys, values, press, 0))


def test_only_what_the_leverage_type_names_counts() -> None:
    (keys, values), (other, _) = _states(), _states(seed=1)
    for leverage_type, changed in (("key", (keys, other)), ("value", (other, values))):
        press = CUR(leverage_type=leverage_type)  # type: ignore[arg-type]
        assert torch.equal(cur_scores(*changed, press, 0), cur_scores(keys, values, press, 0))


def test_a_window_is_not_affected_by_another_but_for_the_common_sum() -> None:
    keys, values = _states()
    larger = keys.clone()
    larger[:, :, 16:] *= 100  # the second of two windows, by one factor
    press = CUR()
    torch.testing.assert_close(
        cur_scores(larger, values, press, 0), cur_scores(keys, values, press, 0)
    )


def test_the_projection_depends_on_the_layer_alone() -> None:
    press, states = CUR(use_random_leverage=True), _states()
    before = torch.get_rng_state()
    scores = cur_scores(*states, press, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(cur_scores(*states, press, 3), scores)
    assert not torch.equal(cur_scores(*states, press, 4), scores)
    one_row = cur_scores(states[0][1:], states[1][1:], press, 3)
    torch.testing.assert_close(one_row[0], scores[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [5, 16, 17, 23])
@pytest.mark.parametrize("random", [True, False])
def test_scores_are_single_precision_and_finite(
    dtype: torch.dtype, length: int, random: bool
) -> None:
    keys, values = _states(length=length, dtype=dtype)
    for leverage_type in TYPES:
        press = CUR(leverage_type=leverage_type, use_random_leverage=random)  # type: ignore[arg-type]
        for size in (0, 1, 300):
            scores = cur_scores(size * keys, size * values, press, 0)
            assert scores.shape == (2, 3, length)
            assert scores.dtype == torch.float32
            assert scores.isfinite().all()


def test_one_token_without_sinks_has_it_all() -> None:
    scores = cur_scores(*_states(length=1), CUR(num_sinks=0), 0)
    torch.testing.assert_close(scores, torch.ones_like(scores))


def test_the_sinks_are_kept_before_all_others() -> None:
    keys, values = _states()
    keys[:, :, 4:] *= 100
    kept = top_positions(cur_scores(keys, values, CUR(), 0), 5)
    assert (kept[..., :4] == torch.arange(4)).all()


def test_a_context_of_sinks_is_left_whole() -> None:
    assert not CUR(num_sinks=4).is_long_enough(4)
    assert CUR(num_sinks=4).is_long_enough(5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_sinks", -1),
        ("local_window_size", 0),
        ("leverage_type", "both"),
        ("compression_ratio", 1.0),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(HyperparameterError, match=rf"{field}={value!r}.*must be"):
        CUR(**{field: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gpt2"])
@pytest.mark.parametrize("random", [True, False])
def test_hooks_and_patches_leave_the_same_bits(
    random: bool, family: str, dtype: torch.dtype
) -> None:
    model = build(family, dtype=dtype)
    inputs = Inputs.random(model.config.vocab_size, lengths=(40, 23, 9))
    press = hooks_impl.CURPress(0.5, use_random_leverage=random)
    difference = compare(model, press, patch_impl.CURPress(**vars(press)), inputs)
    assert difference is None, str(difference)


def test_a_press_can_be_told_another_ratio() -> None:
    press = hooks_impl.CURPress(0.5, num_sinks=2)
    assert vars(replace(press, compression_ratio=0.2)) == {**vars(press), "compression_ratio": 0.2}
