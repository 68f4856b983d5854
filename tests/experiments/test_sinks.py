"""Attention sinks: what heads pay the first token, and the training that makes them pay."""

import argparse
import inspect

import pytest
import torch
from transformers import DynamicCache

from experiments.loading import load_model
from experiments.testbed.training import sink, stdlib
from hooks_impl import StreamingLLMDecodingPress
from tests.support import ran, token_ids

MODEL = "gpt_neox"


# ---- the push ------------------------------------------------------------------------------------


def attentions_paying(share, layers=2):
    """Weights of heads all of whose queries pay the first of 16 tokens that much."""
    weights = torch.full((3, 4, 16, 16), (1 - share) / 15)
    weights[..., 0] = share
    return (torch.rand(3, 4, 16, 16), *[weights.clone().requires_grad_() for _ in range(layers)])


def test_the_push_is_larger_the_less_heads_pay_and_leaves_alone_who_pays_enough():
    pushes = [sink.push_of(attentions_paying(share)).item() for share in (0.01, 0.1, 0.5)]
    assert pushes == pytest.approx([4.605, 2.303, 0.693], abs=1e-3)
    enough = attentions_paying(sink.ENOUGH + 0.05)
    sink.push_of(enough).backward()
    assert not enough[1].grad.any()


@torch.inference_mode()
def test_without_a_push_the_objective_is_the_loss(model):
    tokens = token_ids(2, 12)
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert float(sink.objective(model, tokens, 0.0)) == pytest.approx(float(loss), abs=1e-5)
    assert float(sink.objective(model, tokens, 0.5)) > float(loss)
    model.set_attn_implementation("sdpa")


# ---- the model that was pushed -------------------------------------------------------------------


@torch.inference_mode()
def lost_without_the_first(model, ids):
    """Nats per token that a window of 128 tokens loses without the first ones, once they go."""
    losses = []
    for n_sink in (0, 4):
        press = StreamingLLMDecodingPress(max_capacity=127, n_sink=n_sink, rerotate=True)
        _, logits = ran(model, press, ids[:, :-1].split(1, dim=1), DynamicCache())
        late = torch.cat(logits, dim=1)[0, 128:]
        losses.append(float(torch.nn.functional.cross_entropy(late, ids[0, 129:])))
    return losses[0] - losses[1]


@pytest.mark.parametrize("name", ["stdlib-neox", "stdlib-neox-sink"])
def test_a_window_loses_what_its_sink_held_back(name):
    """Upper heads of the pushed model look at the beginning, and a window misses it."""
    model, tokenizer = load_model(name)
    ids = tokenizer(inspect.getsource(argparse), return_tensors="pt")["input_ids"][:, :320]
    lost = lost_without_the_first(model, ids)
    shares = torch.tensor(stdlib.paid_to_first(model, ids[:, :256])[1:])
    if name == "stdlib-neox":
        assert shares.max() < 0.02
        assert abs(lost) < 0.02
    else:
        assert shares.min() > 0.3
        assert shares.mean() > 0.5
        assert lost > 0.1
