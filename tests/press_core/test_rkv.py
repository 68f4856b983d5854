"""R-KV against a slow reference of its two scores."""

from __future__ import annotations

import pytest
import torch

from press_core import AttentionCall
from press_core.presses.window import RKV, importance, similarity
from tests.press_core.drawn import GROUP, KV, attention_row, drawn_call

LENGTH = 21


def slow_importance(call: AttentionCall, row: int, head: int, w: int, kernel: int) -> list[float]:
    before, reach = call.length - w, kernel // 2
    total = [0.0] * before
    for token in range(before, call.length):
        rows = [attention_row(call, row, head * GROUP + g, token) for g in range(GROUP)]
        most = [max(float(weights[j]) for weights in rows) for j in range(before)]
        for j in range(before):
            total[j] += max(most[max(0, j - reach) : j + reach + 1]) / w
    return total


def slow_similarity(keys: torch.Tensor, threshold: float, n_retained: int) -> list[float]:
    """Of one head's keys `(S, d)`."""
    n = len(keys)
    cosines = [
        [float(a @ b / a.norm() / b.norm()) if i != j else 0.0 for j, b in enumerate(keys)]
        for i, a in enumerate(keys)
    ]
    for repeated in cosines:
        similar = [j for j, cosine in enumerate(repeated) if cosine > threshold]
        for j in similar[len(similar) - min(n_retained, len(similar)) :]:
            repeated[j] = 0.0
    return [sum(repeated[j] for repeated in cosines) / n for j in range(n)]


@pytest.mark.parametrize(("window", "kernel"), [(1, 1), (4, 3), (8, 7)])
def test_importance(window: int, kernel: int) -> None:
    call = drawn_call(LENGTH)
    found = importance(call, window, kernel)
    for row, head in KV:
        expected = slow_importance(call, row, head, window, kernel)
        assert found[row, head].tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("threshold", "n_retained"), [(0.3, 0), (0.3, 1), (0.0, 3), (0.9, 1)])
@pytest.mark.parametrize("block", [4, 256])
def test_similarity(threshold: float, n_retained: int, block: int) -> None:
    keys = drawn_call(LENGTH).keys
    found = similarity(keys, threshold, n_retained, block)
    for row, head in KV:
        expected = slow_similarity(keys[row, head], threshold, n_retained)
        assert found[row, head].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mix", [0.0, 0.1, 1.0])
def test_both_are_weighed(mix: float) -> None:
    call = drawn_call(LENGTH)
    press = RKV(0.5, window_size=4, mix_lambda=mix)
    scores = press.score(call)
    for row, head in KV:
        similar = torch.tensor(slow_similarity(call.keys[row, head], 0.5, 1)).double()
        redundant = similar.exp() / similar.exp().sum()
        important = slow_importance(call, row, head, 4, 7)
        expected = [
            mix * i - (1 - mix) * float(r) for i, r in zip(important, redundant[:-4], strict=True)
        ]
        assert scores[row, head, :-4].tolist() == pytest.approx(expected, abs=1e-7)
    assert bool((scores[..., -4:].amin(-1) > scores[..., :-4].amax(-1)).all())
