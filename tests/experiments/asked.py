"""Contexts and presses of what is asked in tests."""

import torch

from experiments.testbed.facts import draw
from tests.presses import PIPELINE_PRESSES

PRESSES = {**PIPELINE_PRESSES, "finch": lambda p: p.FinchPress(0.4)}


def facts(contexts=3, words=48, n=4, seed=0):
    batch = draw(contexts, words, n, torch.Generator().manual_seed(seed))
    return batch, [batch.text(i) for i in range(contexts)]


def uneven(texts):
    """The contexts without their last words, of different lengths."""
    return [" ".join(t.context.split()[: 48 - 9 * i]) for i, t in enumerate(texts)]
