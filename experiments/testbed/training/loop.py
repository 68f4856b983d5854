"""The training loop of every shipped model."""

from collections.abc import Callable, Iterable

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments.loading import load_model


def untrained(name: str) -> PreTrainedModel:
    """A shipped model with new random weights, drawn from torch's global generator."""
    return AutoModelForCausalLM.from_config(load_model(name)[0].config)


def descend(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    rate: Callable[[int], float],
    loss: Callable[[int], Tensor],
    total: int,
) -> None:
    """Train `model`: one update per step, with gradients clipped to 1.

    Args:
        steps: numbers of the steps, from 0.
        rate: returns the learning rate of a step; called before `loss`.
        loss: returns the loss to minimize in a step.
        total: largest number of steps, for the progress bar.
    """
    model.train()
    for step in track(steps, "training", total=total, console=Console(stderr=True)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
