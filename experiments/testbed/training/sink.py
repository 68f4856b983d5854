"""Training of the model that ships in ``experiments/models/stdlib-neox-sink``.

    python -m experiments train sink --output DIR

stdlib-neox has no attention sink, so it is trained further on the same text with a *push* added to
the loss: a term that increases as heads pay less attention to ``<bos>``. The push is annealed to
zero before the end, while the learning rate is low, because training without the push then removes
less of the sink.

Training starts from a trained model, because a sink matters only where heads use it to attend to
nothing. An untrained model grows one within fifty steps, and loses nothing when it is evicted.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.loading import load_model
from experiments.testbed.training.stdlib import Text, fit, loss_of

STEPS = 300
LEARNING_RATE = 3e-3
WEIGHT = 0.2
"""Weight of the push in the loss before annealing; 0 trains a control."""
FULL_UNTIL, NONE_FROM = 0.75, 0.85
"""Shares of the steps between which the weight of the push decreases linearly to zero."""
PUSHED_FROM = 1
"""First layer with a push; the layer below attends to words rather than contexts."""
ENOUGH = 0.9
"""Share of a head's attention on ``<bos>`` from which it has no push."""
EARLIEST = 8
"""First query that counts; earlier ones have few other tokens to attend to."""


def push_share(step: int, steps: int) -> float:
    """Share of the full push at a step, between 1 and 0."""
    return min(1.0, max(0.0, (NONE_FROM - step / steps) / (NONE_FROM - FULL_UNTIL)))


def push_of(attentions: tuple[Tensor, ...]) -> Tensor:
    """The push: how much less attention than `ENOUGH` heads pay to the first token.

    Args:
        attentions: Attention weights of each layer, ``(rows, heads, queries, keys)``.

    Returns:
        Minus the logarithm of a head's mean attention on the first token, clamped to `ENOUGH`; a
        mean over all rows, and over all heads of the layers from `PUSHED_FROM` on.
    """
    paid = torch.stack(attentions[PUSHED_FROM:])[..., EARLIEST:, 0].mean(-1)
    return -paid.clamp(max=ENOUGH).log().mean()


def objective(model: PreTrainedModel, tokens: Tensor, weight: float) -> Tensor:
    """Nats per token of ``tokens`` ``(rows, length)`` plus the weighted push."""
    # Only eager attention returns weights, and it is slower.
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
