"""Attention sinks: what heads pay the first tokens, and the training that makes them pay."""

from __future__ import annotations

import argparse
import inspect

import pytest
import torch
from transformers import DynamicCache

from experiments.loading import load_model
from experiments.testbed import sinks
from experiments.testbed.training import sink
from hooks_impl import StreamingLLMDecodingPress
from tests.support import build, snapshot, token_ids


@pytest.fixture(scope="module")
def model():
    return build("gpt_neox")


@pytest.fixture(scope="module")
def attention(model):
    return sinks.attention_to_first(model, token_ids(2, 12), n_first=3)


@torch.inference_mode()
def test_attention_is_that_of_the_model(model, attention):
    with sinks.eager(model):
        weights = model(token_ids(2, 12), output_attentions=True).attentions
    for row in attention.itertuples():
        told = weights[row.layer][:, row.head, 6:, :3].sum(-1).mean()
        assert row.share == pytest.approx(float(told), abs=1e-6)
    assert len(attention) == sum(layer.shape[1] for layer in weights)


def test_even_attention_is_what_uniform_weights_would_pay(attention):
    assert attention["even"].unique() == pytest.approx(sum(3 / n for n in range(7, 13)) / 6)


def test_looking_leaves_nothing_behind(model):
    with sinks.eager(model):  # transformers notes on the class that attention can be changed
        pass
    before = snapshot(model)
    sinks.attention_to_first(model, token_ids(1, 8))
    assert snapshot(model) == before


def test_heads_are_shown_by_layer(attention):
    table = sinks.heads_table(attention)
    assert "first 3 tokens together" in table.note
    assert [row[0] for row in table.rows] == [f"layer {i}" for i in attention["layer"].unique()]
    of_one = attention[(attention["layer"] == 1) & (attention["head"] == 2)]["share"].item()
    assert table.rows[1][1 + 2] == f"{of_one:.0%}"


def test_drawn_heads_say_their_shares(attention):
    (panel,) = sinks.heads_figure(attention).axes
    said = {text.get_text() for text in panel.texts}
    assert said == {f"{share:.0%}" for share in attention["share"]}


# ---- the push ------------------------------------------------------------------------------------


def test_the_push_ends_before_the_training():
    shares = [sink.push_share(step, 100) for step in range(100)]
    assert shares[0] == shares[75] == 1
    assert shares[80] == pytest.approx(0.5)
    assert shares == sorted(shares, reverse=True)
    assert not any(shares[85:])


def attentions_paying(share, layers=2):
    """Weights of heads all of whose queries pay the first of 16 tokens that much."""
    weights = torch.full((3, 4, 16, 16), (1 - share) / 15)
    weights[..., 0] = share
    return (torch.rand(3, 4, 16, 16), *[weights.clone().requires_grad_() for _ in range(layers)])


def test_the_push_is_larger_the_less_heads_pay():
    pushes = [sink.push_of(attentions_paying(share)).item() for share in (0.01, 0.1, 0.5)]
    assert pushes == pytest.approx([4.605, 2.303, 0.693], abs=1e-3)


def test_heads_that_pay_enough_are_left_alone():
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


def some_code(tokenizer, length):
    return tokenizer(inspect.getsource(argparse), return_tensors="pt")["input_ids"][:, :length]


def test_upper_heads_of_the_shipped_model_look_at_the_beginning():
    shares = {}
    for name in ("stdlib-neox", "stdlib-neox-sink"):
        model, tokenizer = load_model(name)
        attention = sinks.attention_to_first(model, some_code(tokenizer, 256))
        shares[name] = attention[attention["layer"] > 0]["share"]
    assert shares["stdlib-neox"].max() < 0.02
    assert shares["stdlib-neox-sink"].min() > 0.3
    assert shares["stdlib-neox-sink"].mean() > 0.5


@torch.inference_mode()
def lost_without_the_first(name):
    """Nats per token that a window of 128 tokens loses without the first ones, once they go."""
    model, tokenizer = load_model(name)
    ids = some_code(tokenizer, 512)
    losses = []
    for n_sink in (0, 4):
        press = StreamingLLMDecodingPress(max_capacity=127, n_sink=n_sink, rerotate=True)
        cache = DynamicCache()
        with press(model):
            logits = [model(token[None], past_key_values=cache).logits[0] for token in ids.mT[:-1]]
        late = torch.cat(logits)[128:]
        losses.append(float(torch.nn.functional.cross_entropy(late, ids[0, 129:])))
    return losses[0] - losses[1]


def test_a_window_loses_what_its_sink_held_back():
    assert abs(lost_without_the_first("stdlib-neox")) < 0.02
    assert lost_without_the_first("stdlib-neox-sink") > 0.1
