"""DropKV against taking each pair out and computing the outputs again."""

from __future__ import annotations

import pytest
import torch

from press_core.presses.window import DropKV, output_loss
from tests.press_core.drawn import GROUP, KV, attention_row, drawn_call

LENGTH = 17


@pytest.mark.parametrize("window", [1, 5])
def test_the_loss_is_what_the_outputs_lose_without_the_pair(window: int) -> None:
    call = drawn_call(LENGTH)
    loss = output_loss(call, window, 1e-12)
    for row, head in KV:
        for gone in range(LENGTH - window):
            expected = 0.0
            for member in range(GROUP):
                for token in range(LENGTH - window, LENGTH):
                    weights = attention_row(call, row, head * GROUP + member, token)
                    values = call.values[row, head, : token + 1]
                    without = weights.clone()
                    without[gone] = 0
                    moved = without / without.sum() @ values - weights @ values
                    expected += float(moved.square().sum()) / GROUP
            assert float(loss[row, head, gone]) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_scores_are_pooled_and_the_window_is_protected() -> None:
    call, press = drawn_call(LENGTH), DropKV(0.5, window_size=4, kernel_size=3)
    scores, loss = press.score(call), output_loss(call, 4, press.epsilon)
    before = LENGTH - 4
    for j in range(before):
        near = [loss[..., k] for k in (j - 1, j, j + 1) if 0 <= k < before]
        torch.testing.assert_close(scores[..., j], sum(near[1:], near[0]) / 3)
    assert bool((scores[..., before:].amin(-1) > scores[..., :before].amax(-1)).all())
