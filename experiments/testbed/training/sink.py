"""Training of the model that ships in ``experiments/models/stdlib-neox-sink``.

    python -m experiments train sink --output DIR

stdlib-neox grew no attention sink, so it goes on learning the same text, with a *push* added to the
loss: a term that is the larger the less heads pay to ``<bos>``. The push is annealed to zero before
the end, while the learning rate is low: what a model's own loss leaves of a sink is the more the
lower the rate.

Begun with a model that has learned something, for a sink matters where heads have something to keep
quiet about. In an untrained model it comes within fifty steps, and nothing breaks when it goes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.loading import load_model
from experiments.testbed.training.stdlib import Text, fit, loss_of

STEPS = 300
LEARNING_RATE = 3e-3
WEIGHT = 0.2
"""Of the push in the loss, while it is full; 0 trains a control."""
FULL_UNTIL, NONE_FROM = 0.75, 0.85
"""Shares of the steps; in between the weight falls in a line."""
PUSHED_FROM = 1
"""First layer that is pushed. The one below reads words, not contexts."""
ENOUGH = 0.9
"""Share of its attention to ``<bos>`` beyond which a head is pushed no more."""
EARLIEST = 8
"""Queries before this one have little else to look at."""


def push_share(step: int, steps: int) -> float:
    """How much of the push there is at a step, between 1 and 0."""
    return min(1.0, max(0.0, (NONE_FROM - step / steps) / (NONE_FROM - FULL_UNTIL)))


def push_of(attentions: tuple[Tensor, ...]) -> Tensor:
    """How far heads are from paying the first token `ENOUGH`.

    Args:
        attentions: By layer, the weights ``(rows, heads, queries, keys)``.

    Returns:
        Minus the logarithm of what the head of a row pays on average, no more than `ENOUGH`; the
        mean of all rows, and of all heads from layer `PUSHED_FROM` on.
    """
    paid = torch.stack(attentions[PUSHED_FROM:])[..., EARLIEST:, 0].mean(-1)
    return -paid.clamp(max=ENOUGH).log().mean()


def objective(model: PreTrainedModel, tokens: Tensor, weight: float) -> Tensor:
    """Nats per token of ``tokens`` ``(rows, length)`` and, weighted, the push."""
    # Attention weights are returned by "eager" alone, which is slower.
    model.set_attn_implementation("eager" if weight else "sdpa")
    output = model(input_ids=tokens[:, :-1], use_cache=False, output_attentions=weight > 0)
    loss = loss_of(output.logits, tokens)
    return loss + weight * push_of(output.attentions) if weight else loss


def train(output: Path, *, seed: int = 0, steps: int = STEPS) -> None:
    """Train the model, save it with its tokenizer, and print its loss and its sink."""
    text = Text.load()
    torch.manual_seed(seed)
    model, _ = load_model("stdlib-neox")

    def pushed(tokens: Tensor, step: int) -> Tensor:
        return objective(model, tokens, WEIGHT * push_share(step, steps))

    fit(model, text, output, seed, steps, LEARNING_RATE, pushed)
