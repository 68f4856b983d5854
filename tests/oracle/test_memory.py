"""Attention weights that nobody returns take memory that grows with the context, not its square."""

from __future__ import annotations

import itertools

import kvpress
import pytest
import torch

import hooks_impl
from tests.oracle.stand_in import N_HEADS, Memory, StandIn

LENGTHS = (512, 1024, 2048)


@pytest.fixture(scope="module")
def stand_ins():
    return {(n, eager): StandIn(n, eager) for n in LENGTHS for eager in (False, True)}


def peak(stand_in, press):
    memory = Memory()
    stand_in.measure(memory, press, stand_in.ids[:, : stand_in.length])
    return memory.peak


def test_observed_attention_without_weights(stand_ins):
    """Under sdpa: twice the context, twice the memory."""
    ours = [peak(stand_ins[n, False], hooks_impl.ObservedAttentionPress(0.5)) for n in LENGTHS]
    for shorter, longer in itertools.pairwise(ours):
        assert longer < 2.1 * shorter
    assert ours[-1] < stand_ins[LENGTHS[-1], True].weights.nbytes / 4


def test_kvpress_needs_the_weights(stand_ins):
    """Which only eager attention makes: four times as many."""
    press = kvpress.ObservedAttentionPress(0.5)
    with pytest.raises(AssertionError, match="eager"):
        peak(stand_ins[LENGTHS[0], False], press)
    sizes = [stand_ins[n, True].weights.nbytes for n in LENGTHS]
    assert sizes == [4 * N_HEADS * n**2 for n in LENGTHS]


def test_memory_is_counted():
    memory = Memory()
    with memory.at(press=True):
        first = torch.zeros(1000, dtype=torch.float64)
        del first
        second = torch.zeros(1500, dtype=torch.float64)
    assert memory.peak == second.nbytes
    with memory.at(press=True):
        several = [torch.zeros(1000, dtype=torch.float64) for _ in range(3)]
    assert memory.peak == sum(x.nbytes for x in several)
