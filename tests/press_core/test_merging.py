"""Merging on eviction, and CaM's, against slow references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import patch_impl
from press_core import AttentionCall, Eviction
from press_core.observed import Moment
from press_core.presses.decoding import RECEIVED
from press_core.presses.merging import most_similar, uniform
from press_core.tiles import NUMBERS
from tests.press_core.drawn import BATCH, KV_HEADS, drawn, drawn_call

LENGTH = 24


def slow(
    call: AttentionCall, kept: list[int], row: int, head: int, threshold: float, fraction: float
) -> Tensor:
    """Values of one head after merging, one evicted token at a time."""
    keys, values = call.keys[row, head], call.values[row, head]
    evicted = [t for t in range(call.length) if t not in kept]
    closest = {}
    for e in evicted:
        cosines = [float(keys[e] @ keys[j] / keys[e].norm() / keys[j].norm()) for j in kept]
        closest[e] = max((cosine, place) for place, cosine in enumerate(cosines))
    ranked = sorted(evicted, key=lambda e: -closest[e][0])
    n_merged = len(evicted) if fraction == 1 else 1 + int((len(evicted) - 1) * fraction)
    sums = [values[j].clone() for j in kept]
    weights = [1.0] * len(kept)
    for e in ranked[:n_merged]:
        cosine, place = closest[e]
        if cosine < threshold:
            continue
        norms = float(values[e].norm()), float(values[kept[place]].norm())
        weight = max(0.0, cosine) * norms[0] / (norms[0] + norms[1] + 1e-6)
        sums[place] += weight * values[e]
        weights[place] += weight
    return torch.stack([total / weight for total, weight in zip(sums, weights, strict=True)])


@pytest.mark.parametrize(
    ("threshold", "fraction"), [(0.0, 1.0), (0.4, 1.0), (0.0, 0.35), (0.3, 0.6), (1.0, 1.0)]
)
@pytest.mark.parametrize("ratio", [0.25, 0.8])
def test_against_the_slow_reference(ratio: float, threshold: float, fraction: float) -> None:
    call = drawn_call(LENGTH)
    inner = patch_impl.KnormPress(ratio)
    press = patch_impl.MergingPress(inner, threshold, fraction)
    merged, plain = press.evict(call), inner.evict(call)
    assert isinstance(merged, Eviction)
    assert torch.equal(merged.known_kept, plain.known_kept)
    assert torch.equal(merged.keys, plain.keys)
    for row in range(BATCH):
        for head in range(KV_HEADS):
            kept = plain.known_kept[row, head].tolist()
            expected = slow(call, kept, row, head, threshold, fraction)
            torch.testing.assert_close(merged.values[row, head], expected)


def test_equal_values_stay_what_they_are() -> None:
    """A weighted mean of equal values."""
    call = drawn_call(LENGTH)
    call = drawn_call(LENGTH, values=call.values[:, :, :1].expand_as(call.values))
    values = patch_impl.MergingPress(patch_impl.KnormPress(0.5)).evict(call).values
    torch.testing.assert_close(values, call.values[:, :, :12])


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = drawn_call(LENGTH)
    keys, others = call.keys[:, :, :10], call.keys[:, :, 10:]
    found = most_similar(keys, others)
    monkeypatch.setitem(NUMBERS, "cpu", 3 * len(keys) * others.shape[2])
    for whole, parts in zip(found, most_similar(keys, others), strict=True):
        torch.testing.assert_close(whole, parts)


# ---- CaM -----------------------------------------------------------------------------------------

TARGET, STEPS, SEED = 14, 6, 3


def due(seed: int = 0) -> AttentionCall:
    """A decoding step on which the press is due, and what keys have received so far."""
    received = drawn(BATCH, KV_HEADS, LENGTH, seed=seed).sigmoid()
    when = Moment(decoding=True, n_steps=STEPS, n_forwards=2 * STEPS)
    return drawn_call(LENGTH, seed, memory={RECEIVED: received}, when=when)


@pytest.mark.parametrize("merge_budget", [1, 3, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_cam_against_the_slow_reference(merge_budget: int, seed: int) -> None:
    call = due(seed)
    base = patch_impl.KnormPress()
    press = patch_impl.CAMPress(base, target_size=TARGET, merge_budget=merge_budget, seed=SEED)
    eviction = press.evict(call)
    numbers = uniform((KV_HEADS, STEPS), SEED, call.site.layer_idx, 2 * STEPS)
    for row in range(BATCH):
        scores = [
            sum(-float(call.keys[row, head, t].norm()) for head in range(KV_HEADS)) / KV_HEADS
            for t in range(LENGTH)
        ]
        ranked = sorted(range(LENGTH), key=lambda t: -scores[t])
        kept, gone = sorted(ranked[:TARGET]), sorted(ranked[TARGET : TARGET + STEPS])
        for head in range(KV_HEADS):
            assert eviction.known_kept[row, head].tolist() == kept
            received = call.memory[RECEIVED][row, head]
            values = {t: call.values[row, head, t].clone() for t in kept}
            for index, e in enumerate(gone):
                window = [t for t in kept if t > e][:merge_budget]
                if not window:
                    continue
                mean = sum(float(received[t]) for t in window) / len(window)
                if float(numbers[head, index]) < min(1.0, float(received[e]) / mean):
                    for t in window:
                        values[t] += call.values[row, head, e] / len(window)
            expected = torch.stack([values[t] for t in kept])
            torch.testing.assert_close(eviction.values[row, head], expected)


def test_numbers_depend_on_seed_layer_and_forward() -> None:
    found = [uniform((2, 9), *key) for key in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2)]]
    assert torch.equal(found[0], uniform((2, 9), 0, 0, 1))
    assert all(not torch.equal(found[0], other) for other in found[1:])
