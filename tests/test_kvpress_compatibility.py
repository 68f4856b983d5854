"""A press written for kvpress runs unchanged on `hooks_impl`: one import is all that differs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from experiments.testbed.families import build
from hooks_impl import BasePress, KnormPress, ScorerPress, queries
from press_core import Needs, UnsupportedInputError, kept_lengths
from tests.support import left_padded, token_ids


@dataclass
class ValueNormPress(ScorerPress):
    """As a user of kvpress would write it."""

    power: float = 1.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert module.layer_idx >= 0
        assert hidden_states.shape[1] == keys.shape[2]
        assert attentions is None
        assert "position_embeddings" in kwargs
        return values.norm(dim=-1) ** self.power


@dataclass
class EveryOther(BasePress):
    """Overrides `compress` and tells nobody which positions it kept."""

    def post_init_from_model(self, model: nn.Module) -> None:
        self.n_layers = model.config.num_hidden_layers

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        if module.layer_idx == self.n_layers - 1:
            return keys, values
        return keys[:, :, ::2], values[:, :, ::2]


@dataclass
class Counting(KnormPress):
    """Overrides `forward_hook`, and calls the original."""

    def __post_init__(self):
        super().__post_init__()
        self.calls = 0

    def forward_hook(self, module, input, kwargs, output):
        self.calls += 1
        return super().forward_hook(module, input, kwargs, output)


def prefill(press, length=30):
    model = build("llama", num_layers=2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(model):
        model(token_ids(2, length), past_key_values=cache)
        logits = model(token_ids(2, 3), past_key_values=cache).logits
    return [int(kept[0, 0]) - 3 for kept in kept_lengths(cache)], logits


def test_score():
    kept, logits = prefill(ValueNormPress(compression_ratio=0.4, power=2.0))
    assert kept == [18, 18]
    assert torch.isfinite(logits).all()


def test_compress_with_layers_of_different_length():
    kept, logits = prefill(EveryOther())
    assert kept == [15, 30]
    assert torch.isfinite(logits).all()


def test_a_press_that_does_not_say_what_it_kept_is_refused_where_that_matters():
    """Its keys could be told neither from padding nor which queries they belong to."""
    model = build("llama", num_layers=2)
    ids, mask, _ = left_padded(2, 30, [0, 7])
    with (
        torch.no_grad(),
        EveryOther()(model),
        pytest.raises(UnsupportedInputError, match="padded batch"),
    ):
        model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config))
    with (
        torch.no_grad(),
        KnormPress(0.5)(model),
        EveryOther()(model),
        pytest.raises(UnsupportedInputError, match="inner scope"),
    ):
        model(ids, past_key_values=DynamicCache(config=model.config))
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), EveryOther()(model), KnormPress(0.5)(model):
        model(ids, past_key_values=cache)
    assert [int(kept[0, 0]) for kept in kept_lengths(cache)] == [8, 15]


def test_forward_hook():
    press = Counting(0.5)
    kept, _ = prefill(press)
    assert kept == [15, 15]
    assert press.calls == 4  # two layers, prefill and question


def test_exact_queries_for_presses_of_ones_own():
    seen = []

    @dataclass
    class Peeking(ScorerPress):
        needs = Needs.QUERIES

        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            seen.append(queries(kwargs, last=4))
            return keys.norm(dim=-1)

    prefill(Peeking(0.5))
    assert [tuple(query.shape) for query in seen] == [(2, 4, 4, 16)] * 2
