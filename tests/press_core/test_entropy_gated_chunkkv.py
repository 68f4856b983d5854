"""ChunkKV with a gate, against a slow reference that fills a budget chunk by chunk."""

from __future__ import annotations

import math
from statistics import fmean

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from press_core.presses.chunks import gated_order


def entropy(scores: list[float]) -> float:
    least = min(0.0, *scores)
    raised = [score - least for score in scores]
    total = sum(raised)
    if total <= 0 or len(scores) == 1:
        return 0.0
    return -sum(x / total * math.log(x / total) for x in raised if x > 0) / math.log(len(scores))


def lower_median(numbers: list[float]) -> float:
    return sorted(numbers)[(len(numbers) - 1) // 2]


def slow(scores: list[float], budget: int, chunk_length: int, low: int) -> list[int]:
    """Which tokens are kept."""
    starts = range(0, len(scores), chunk_length)
    chunks = [list(range(s, min(s + chunk_length, len(scores)))) for s in starts]
    means = [fmean(scores[t] for t in chunk) for chunk in chunks]
    entropies = [entropy([scores[t] for t in chunk]) for chunk in chunks]
    kept: list[int] = []
    for i in sorted(range(len(chunks)), key=lambda i: -means[i]):
        best = sorted(chunks[i], key=lambda t: -scores[t])
        if means[i] >= lower_median(means) and entropies[i] < lower_median(entropies):
            best = best[:low]
        kept += best[: budget - len(kept)]
    rest = sorted(set(range(len(scores))) - set(kept), key=lambda t: -scores[t])
    return sorted(kept + rest[: budget - len(kept)])


@st.composite
def scored(draw: st.DrawFn) -> Tensor:
    length, seed = draw(st.integers(3, 60)), draw(st.integers(0, 2**16))
    scores = torch.rand(length, generator=torch.Generator().manual_seed(seed)).double()
    return scores ** draw(st.sampled_from([1, 4])) - draw(st.sampled_from([0.0, 0.3]))


@settings(max_examples=200, deadline=None)
@given(scored(), st.integers(2, 12), st.data())
def test_against_the_slow_reference(scores: Tensor, chunk_length: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(1, chunk_length - 1))
    budget = data.draw(st.integers(1, len(scores)))
    kept = gated_order(scores, chunk_length, low)[:budget].sort().values
    assert kept.tolist() == slow(scores.tolist(), budget, chunk_length, low)
