"""CurDKV against a slow reference, and its properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from press_core.presses.leverage import CUR, sketch
from tests.press_core.drawn import called, drawn, site

TYPES = ("key", "value", "kv_avg", "kv_product")


def _states(seed: int = 0, length: int = 23) -> tuple[Tensor, Tensor]:
    keys, values = drawn(2, 2, 3, length, 8, seed=seed)
    return keys, values


def _scores(press: CUR, keys: Tensor, values: Tensor, layer: int = 1) -> Tensor:
    return press.score(called(site=site(layer), hidden_states=keys, keys=keys, values=values))


def _leverage(states: Tensor, press: CUR) -> Tensor:
    """Squared norms, each divided by the sum of its window."""
    if press.use_random_leverage:
        states = states @ sketch((8, 20), 1, states)
    squares = torch.stack([row @ row for row in states])
    if not press.use_local_approximation:
        return squares
    width = press.local_window_size
    starts = [position - position % width for position in range(len(states))]
    return squares / torch.stack([squares[start : start + width].sum() for start in starts])


def _expected(keys: Tensor, values: Tensor, press: CUR) -> Tensor:
    k, v = _leverage(keys, press), _leverage(values, press)
    combined = {"key": k, "value": v, "kv_avg": (k + v) / 2, "kv_product": k * v}
    return combined[press.leverage_type] / combined[press.leverage_type].sum()


@pytest.mark.parametrize("width", [1, 5, 23, 64])
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("leverage_type", TYPES)
def test_scores_are_shares_of_squared_norms(
    leverage_type: Any, random: bool, local: bool, width: int
) -> None:
    press = CUR(0.5, 4, leverage_type, random, local, width)
    keys, values = _states()
    scores = _scores(press, keys, values)
    for row in range(2):
        for head in range(3):
            expected = _expected(keys[row, head], values[row, head], press)[4:]
            torch.testing.assert_close(scores[row, head, 4:], expected, atol=1e-9, rtol=1e-7)
            assert scores[row, head, :4].min() > scores[row, head, 4:].max()


def test_the_projection_depends_on_the_layer_alone() -> None:
    press, states = CUR(use_random_leverage=True), _states()
    before = torch.get_rng_state()
    scores = _scores(press, *states)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(_scores(press, *states), scores)
    assert not torch.equal(_scores(press, *states, layer=2), scores)
    one_row = _scores(press, *(x[1:] for x in states))
    torch.testing.assert_close(one_row[0], scores[1])


def test_one_token_without_sinks_has_it_all() -> None:
    scores = _scores(CUR(num_sinks=0), *_states(length=1))
    torch.testing.assert_close(scores, torch.ones_like(scores))
