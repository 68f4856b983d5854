"""CaM's merging against a slow reference."""

from __future__ import annotations

import pytest
import torch

import patch_impl
from press_core.observed import Moment
from press_core.presses.h2o import RECEIVED
from press_core.presses.merging import uniform
from tests.press_core.drawn import BATCH, KV_HEADS, drawn, drawn_call

LENGTH, TARGET, STEPS, SEED = 24, 14, 6, 3


def due(seed: int = 0):
    """A decoding step on which the press is due, and what keys have received so far."""
    received = drawn(BATCH, KV_HEADS, LENGTH, seed=seed).sigmoid()
    when = Moment(decoding=True, n_steps=STEPS, n_forwards=2 * STEPS)
    return drawn_call(LENGTH, seed, memory={RECEIVED: received}, when=when)


@pytest.mark.parametrize("merge_budget", [1, 3, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_against_the_slow_reference(merge_budget, seed):
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


def test_numbers_depend_on_seed_layer_and_forward():
    drawn = [uniform((2, 9), *key) for key in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2)]]
    assert torch.equal(drawn[0], uniform((2, 9), 0, 0, 1))
    assert all(not torch.equal(drawn[0], other) for other in drawn[1:])
