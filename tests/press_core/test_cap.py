"""CAPKV against a slow reference, and what its score means."""

from __future__ import annotations

import pytest
import torch

from press_core import AttentionCall
from press_core.presses.expected_attention import Cap
from tests.press_core.drawn import BATCH, DIM, GROUP, KV, KV_HEADS, drawn_call, rotated

LENGTH = 23


def slow(call: AttentionCall, press: Cap, row: int, head: int) -> list[float]:
    """Scores of the tokens after the sinks, one number at a time."""
    assert call.query is not None
    tokens = range(press.n_sink, call.length)
    total = [0.0] * len(tokens)
    for member in range(GROUP):
        queries = [call.query.states[row, head * GROUP + member, t] for t in tokens]
        mean = sum(queries[1:], queries[0]) / len(queries)
        coming = range(call.length, call.length + press.n_future_positions)
        anchor = sum((rotated(mean, p) for p in coming), torch.zeros(DIM).double()) / len(coming)
        cosines = [
            float(call.keys[row, head, t] @ anchor / call.keys[row, head, t].norm() / anchor.norm())
            for t in tokens
        ]
        weights = [torch.tensor(press.tau * (c - max(cosines))).exp().double() for c in cosines]
        matrix = torch.eye(DIM).double()
        for t, weight in zip(tokens, weights, strict=True):
            value = call.values[row, head, t]
            matrix += (weight + press.epsilon) * torch.outer(value, value)
        inverse = matrix.inverse()
        for i, (t, weight) in enumerate(zip(tokens, weights, strict=True)):
            value = call.values[row, head, t]
            total[i] += float(weight * (value @ inverse @ value)) / GROUP
    return total


@pytest.mark.parametrize(
    "press",
    [
        Cap(0.5, n_future_positions=9),
        Cap(0.5, tau=0.5, n_future_positions=1, n_sink=0, epsilon=0.1),
    ],
    ids=str,
)
def test_against_the_slow_reference(press: Cap) -> None:
    call = drawn_call(LENGTH)
    scores = press.score(call)
    assert scores.shape == (BATCH, KV_HEADS, LENGTH)
    for row, head in KV:
        expected = torch.tensor(slow(call, press, row, head)).double()
        # The rotation is averaged in the dtype of the model's own cosines, float32.
        torch.testing.assert_close(
            scores[row, head, press.n_sink :], expected, rtol=1e-5, atol=1e-7
        )


def test_sinks_score_highest() -> None:
    scores = Cap(0.5).score(drawn_call(LENGTH))
    assert bool((scores[..., :4].amin(-1) > scores[..., 4:].amax(-1)).all())
