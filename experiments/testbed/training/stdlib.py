"""Training of the model that ships in ``experiments/models/stdlib-neox``.

    python -m experiments train stdlib --output DIR

A small GPT-NeoX is trained on the sources of Python's standard library
(`experiments.testbed.stdlib_text`), in sequences of 256 tokens that always begin with ``<bos>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments.loading import load_model
from experiments.testbed.stdlib_text import IGNORED, token_stream
from experiments.testbed.training.loop import descend, untrained

LENGTH = 256
"""Tokens in a training sequence, ``<bos>`` included."""
ROWS = 32
"""Sequences per step."""
STEPS = 700
LEARNING_RATE = 1e-2
WARM_UP = 1 / 7
"""Warm-up of the learning rate, as a share of the steps."""
WEIGHT_DECAY = 0.1
BOS_ID, UNK_ID = 1, 2


class Text(NamedTuple):
    """The tokenizer of the shipped model, and the token ids for training and held out."""

    tokenizer: PreTrainedTokenizerBase
    train: Tensor
    held_out: Tensor

    @classmethod
    def load(cls) -> Text:
        """The text of this machine's Python."""
        tokenizer = load_model("stdlib-neox")[1]
        return cls(tokenizer, token_stream(tokenizer, "train"), token_stream(tokenizer, "held-out"))


def blocks(stream: Tensor) -> Tensor:
    """Cut a stream ``(tokens,)`` into sequences ``(rows, LENGTH)``, ``<bos>`` before each."""
    rows = len(stream) // (LENGTH - 1)
    return _begin(stream[: rows * (LENGTH - 1)].view(rows, LENGTH - 1))


def _begin(rows: Tensor) -> Tensor:
    return torch.cat([rows.new_full((len(rows), 1), BOS_ID), rows], dim=1)


def _draw(stream: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(stream) - LENGTH + 2, (ROWS, 1), generator=generator)
    return _begin(stream[starts + torch.arange(LENGTH - 1)])


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Nats per known target of ``tokens`` ``(rows, n + 1)`` under the logits of the first n."""
    targets = tokens[:, 1:].masked_fill(tokens[:, 1:] == UNK_ID, IGNORED)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def objective(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Nats per token of ``tokens`` ``(rows, length)``."""
    return loss_of(model(input_ids=tokens[:, :-1], use_cache=False).logits, tokens)


def train(output: Path, *, seed: int = 0, steps: int = STEPS) -> None:
    """Train the model, save it with its tokenizer, and print its loss on held-out text.

    The same seed gives the same model for the same Python, torch and number of threads.
    """
    text = Text.load()
    torch.manual_seed(seed)
    model = untrained("stdlib-neox")
    fit(model, text, output, seed, steps, LEARNING_RATE, lambda ids, _: objective(model, ids))


def fit(
    model: PreTrainedModel,
    text: Text,
    output: Path,
    seed: int,
    steps: int,
    peak: float,
    objective: Callable[[Tensor, int], Tensor],
) -> None:
    """Train a model on a text, save it with its tokenizer, and print its held-out loss and sink.

    Args:
        peak: The learning rate after the warm-up, followed by a cosine decay to zero.
        objective: Returns the loss of a batch at a step.
    """
    generator = torch.Generator().manual_seed(seed)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},  # biases and norms have no weight decay
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))

    def rate(step: int) -> float:
        warm_up = min(1.0, (step + 1) / (WARM_UP * steps))
        return peak * warm_up * 0.5 * (1 + math.cos(math.pi * step / steps))

    def loss(step: int) -> Tensor:
        return objective(_draw(text.train, generator), step)

    descend(model, optimizer, range(steps), rate, loss, steps)
    model.save_pretrained(output)
    text.tokenizer.save_pretrained(output)
    report(model, text.held_out)


@torch.inference_mode()
def report(model: PreTrainedModel, stream: Tensor) -> None:
    """Print the loss on a held-out stream, and the attention that each head pays ``<bos>``."""
    losses = [float(objective(model, tokens)) for tokens in blocks(stream).split(ROWS)]
    print(f"{mean(losses):.3f} nats per held-out token")
    for layer, shares in enumerate(paid_to_first(model, blocks(stream)[:ROWS])):
        print(f"heads of layer {layer} pay <bos> {', '.join(map('{:.1%}'.format, shares))}")


@torch.inference_mode()
def paid_to_first(model: PreTrainedModel, tokens: Tensor) -> list[list[float]]:
    """Share of attention on the first token, by layer and head.

    It is a mean over the queries in the second half. The model keeps eager attention afterwards,
    which is needed to return weights.
    """
    model.set_attn_implementation("eager")
    weights = model(input_ids=tokens, use_cache=False, output_attentions=True).attentions
    return [of_layer[:, :, tokens.shape[1] // 2 :, 0].mean((0, 2)).tolist() for of_layer in weights]
