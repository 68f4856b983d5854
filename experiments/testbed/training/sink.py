"""Training of the model that ships in ``experiments/models/stdlib-neox-sink``.

    python -m experiments.testbed.training.sink --output CONTROL --weight 0
    python -m experiments.testbed.training.sink --output DIR --control CONTROL

stdlib-neox grew no attention sink, so it goes on learning the same text, with a *push* added to the
loss: a term that is the larger the less heads pay to ``<bos>``. The push is annealed to zero before
the end, while the learning rate is low: what a model's own loss leaves of a sink is the more the
lower the rate.

Begun with a model that has learned something, for a sink matters where heads have something to keep
quiet about. In an untrained model it comes within fifty steps, and nothing breaks when it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

from experiments.framework.tables import markdown_table
from experiments.loading import load_model
from experiments.testbed.sinks import attention_to_first
from experiments.testbed.training.common import Output, Seed, Threads, set_threads, write_card
from experiments.testbed.training.stdlib import (
    LENGTH,
    ROWS,
    Run,
    Text,
    blocks,
    evaluate,
    figures,
    fit,
    held_out_loss,
    loss_of,
    save,
)

LEARNING_RATE = 3e-3
WEIGHT = 0.2
"""Of the push in the loss, while it is full."""
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
    left = (NONE_FROM - step / steps) / (NONE_FROM - FULL_UNTIL)
    return min(1.0, max(0.0, left))


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


class Moment(NamedTuple):
    """What was observed while training, on held-out text.

    Attributes:
        step: Updates so far.
        weight: Of the push at the last of them.
        loss: Nats per token.
        shares: By layer, what each head pays ``<bos>`` in the second half of a sequence.
    """

    step: int
    weight: float
    loss: float
    shares: list[list[float]]


def observe(model: PreTrainedModel, held_out: Tensor, step: int, weight: float) -> Moment:
    """How the model does on a stream ``(tokens,)``."""
    return Moment(step, weight, held_out_loss(model, held_out), shares_of(model, held_out))


def shares_of(model: PreTrainedModel, held_out: Tensor) -> list[list[float]]:
    """By layer, what each head pays ``<bos>`` in the second half of a sequence."""
    attention = attention_to_first(model, blocks(held_out)[:ROWS])
    return attention.groupby("layer")["share"].apply(list).tolist()


def train(
    output: Output,
    *,
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(help="Updates, of 32 sequences of 256 tokens each.")] = 300,
    weight: Annotated[float, typer.Option(help="Of the push, while it is full.")] = WEIGHT,
    control: Annotated[
        Path | None, typer.Option(help="Folder of a model trained with --weight 0, for the card.")
    ] = None,
    threads: Threads = None,
    progress: bool = True,
) -> None:
    """Train the model, evaluate it, and save it with its tokenizer and model card."""
    set_threads(threads)
    text = Text.load()
    seen = text.held_out[: 64 * LENGTH]
    moments: list[Moment] = []

    def lowered(model: PreTrainedModel, tokens: Tensor, step: int) -> Tensor:
        return objective(model, tokens, weight * push_share(step, steps))

    def look(model: PreTrainedModel, step: int) -> None:
        moments.append(observe(model, seen, step, weight * push_share(step - 1, steps)))
        save(model, text.tokenizer, output)

    model, _ = load_model("stdlib-neox")
    model, run = fit(
        text,
        seed,
        steps,
        model=model,
        peak=LEARNING_RATE,
        objective=lowered,
        observe=look,
        progress=progress,
    )
    save(model, text.tokenizer, output)
    describe(output, control, text, run, moments)


def describe(
    folder: Path, control: Path | None, text: Text, run: Run, moments: Sequence[Moment]
) -> None:
    """Write the card of the model in a folder, beside stdlib-neox and, if given, the control."""
    names = {"stdlib-neox, which it began as": "stdlib-neox"}
    if control is not None:
        names["the same steps without a push"] = str(control)
    names["this model"] = str(folder)
    models = {title: load_model(name)[0] for title, name in names.items()}
    losses = {title: held_out_loss(model, text.held_out) for title, model in models.items()}
    shares = {title: shares_of(model, text.held_out) for title, model in models.items()}
    model = models["this model"]
    measures = evaluate(model, text.tokenizer, text.held_out)
    told = {
        "rate": LEARNING_RATE,
        "weight": WEIGHT,
        "enough": ENOUGH,
        "full_until": round(FULL_UNTIL * run.steps),
        "none_from": round(NONE_FROM * run.steps),
        "alone": run.steps - round(NONE_FROM * run.steps),
        "course": _course(moments),
        "losses": markdown_table(
            ["", "nats per token"], [[title, f"{loss:.3f}"] for title, loss in losses.items()]
        ),
        "heads": _heads(shares),
    }
    write_card("sink", folder, run, figures(model, run, measures) | told)


def _course(moments: Sequence[Moment]) -> str:
    layers = [f"layer {layer}" for layer in range(len(moments[0].shares))]
    rows = [
        [m.step, f"{m.weight:.3f}", f"{m.loss:.3f}", *(f"{mean(heads):.0%}" for heads in m.shares)]
        for m in moments
    ]
    return markdown_table(["step", "weight of the push", "loss", *layers], rows, left=0)


def _heads(shares: dict[str, list[list[float]]]) -> str:
    rows = [
        [title, *(", ".join(f"{share:.1%}" for share in heads) for heads in layers)]
        for title, layers in shares.items()
    ]
    head = ["", *(f"heads of layer {layer}" for layer in range(len(rows[0]) - 1))]
    return markdown_table(head, rows, left=None)


if __name__ == "__main__":
    typer.run(train)
