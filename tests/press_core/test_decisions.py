"""What presses keep and merge, against slow references, without a model."""

import math
from statistics import fmean, median_low

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import patch_impl
from press_core.observed import Moment
from press_core.presses.chunks import gated_order
from press_core.presses.decoding import RECEIVED
from press_core.presses.wrappers import most_similar, uniform
from press_core.tiles import NUMBERS
from tests.press_core.drawn import BATCH, KV, KV_HEADS, drawn, drawn_call

LENGTH = 24


def slow_merge(call, kept, row, head, threshold, fraction):
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
def test_merging_against_the_slow_reference(ratio, threshold, fraction):
    call = drawn_call(LENGTH)
    inner = patch_impl.KnormPress(ratio)
    press = patch_impl.MergingPress(inner, threshold, fraction)
    merged, plain = press.evict(call), inner.evict(call)
    assert torch.equal(merged.known_kept, plain.known_kept)
    assert torch.equal(merged.keys, plain.keys)
    for row, head in KV:
        kept = plain.known_kept[row, head].tolist()
        expected = slow_merge(call, kept, row, head, threshold, fraction)
        torch.testing.assert_close(merged.values[row, head], expected)


def test_blocks_change_nothing(monkeypatch):
    call = drawn_call(LENGTH)
    keys, others = call.keys[:, :, :10], call.keys[:, :, 10:]
    found = most_similar(keys, others)
    monkeypatch.setitem(NUMBERS, "cpu", 3 * len(keys) * others.shape[2])
    for whole, parts in zip(found, most_similar(keys, others), strict=True):
        torch.testing.assert_close(whole, parts)


# ---- CaM -----------------------------------------------------------------------------------------

TARGET, STEPS, SEED = 14, 6, 3


def due(seed=0):
    """A decoding step on which the press is due, and what keys have received so far."""
    received = drawn(BATCH, KV_HEADS, LENGTH, seed=seed).sigmoid()
    when = Moment(decoding=True, n_steps=STEPS, n_forwards=2 * STEPS)
    return drawn_call(LENGTH, seed, memory={RECEIVED: received}, when=when)


def test_seeded_draws_do_not_depend_on_the_default_device():
    call, base = due(0), patch_impl.KnormPress()
    cam = patch_impl.CAMPress(base, target_size=TARGET, seed=SEED)
    for press in (patch_impl.RandomPress(0.5, SEED), patch_impl.LeverageScorePress(0.5), cam):
        with torch.device("meta"):
            found = press.evict(call)
        assert torch.equal(found.values, press.evict(call).values)


class Marking(patch_impl.ScorerPress):
    """Scores as Knorm, but for every fourth token, which is to be evicted first."""

    def score(self, call):
        scores = -call.keys.norm(dim=-1)
        return scores.index_fill(-1, torch.arange(0, call.length, 4), float("-inf"))


@pytest.mark.parametrize("merge_budget", [1, 3, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_cam_against_the_slow_reference(merge_budget, seed):
    call, base = due(seed), Marking()
    press = patch_impl.CAMPress(base, target_size=TARGET, merge_budget=merge_budget, seed=SEED)
    eviction = press.evict(call)
    numbers = uniform((KV_HEADS, STEPS), SEED, call.site.layer_idx, 2 * STEPS)
    for row in range(BATCH):
        scores = [
            sum(-float(call.keys[row, head, t].norm()) for head in range(KV_HEADS)) / KV_HEADS
            for t in range(LENGTH)
        ]
        scores[::4] = [float("-inf")] * len(scores[::4])
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
            torch.testing.assert_close(eviction.values[row, head], expected, rtol=0, atol=1e-12)


def test_numbers_depend_on_seed_layer_and_forward():
    found = [uniform((2, 9), *key) for key in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2)]]
    assert torch.equal(found[0], uniform((2, 9), 0, 0, 1))
    assert all(not torch.equal(found[0], other) for other in found[1:])


# ---- ChunkKV with a gate, which fills a budget chunk by chunk -----------------------------------


def entropy(scores):
    least = min(0.0, *scores)
    raised = [score - least for score in scores]
    total = sum(raised)
    if total <= 0 or len(scores) == 1:
        return 0.0
    return -sum(x / total * math.log(x / total) for x in raised if x > 0) / math.log(len(scores))


def slow_gated(scores, budget, chunk_length, low):
    """Which tokens are kept."""
    starts = range(0, len(scores), chunk_length)
    chunks = [list(range(s, min(s + chunk_length, len(scores)))) for s in starts]
    means = [fmean(scores[t] for t in chunk) for chunk in chunks]
    entropies = [entropy([scores[t] for t in chunk]) for chunk in chunks]
    kept = []
    for i in sorted(range(len(chunks)), key=lambda i: -means[i]):
        best = sorted(chunks[i], key=lambda t: -scores[t])
        if means[i] >= median_low(means) and entropies[i] < median_low(entropies):
            best = best[:low]
        kept += best[: budget - len(kept)]
    rest = sorted(set(range(len(scores))) - set(kept), key=lambda t: -scores[t])
    return sorted(kept + rest[: budget - len(kept)])


@st.composite
def scored(draw):
    length, seed = draw(st.integers(3, 60)), draw(st.integers(0, 2**16))
    scores = torch.rand(length, generator=torch.Generator().manual_seed(seed)).double()
    return scores ** draw(st.sampled_from([1, 4])) - draw(st.sampled_from([0.0, 0.3]))


@settings(max_examples=200)
@given(scored(), st.integers(2, 12), st.data())
def test_gated_chunks_against_the_slow_reference(scores, chunk_length, data):
    low = data.draw(st.integers(1, chunk_length - 1))
    budget = data.draw(st.integers(1, len(scores)))
    kept = gated_order(scores, chunk_length, low)[:budget].sort().values
    assert kept.tolist() == slow_gated(scores.tolist(), budget, chunk_length, low)
