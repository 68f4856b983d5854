"""The loop in which every shipped model was trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from experiments.loading import load_model


def untrained(name: str) -> PreTrainedModel:
    """A shipped model with its weights drawn anew, from torch's global generator."""
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
        steps: their numbers, from 0.
        rate: the learning rate at a step, asked for before its loss.
        loss: what the model is to lower at a step.
        total: how many steps there are at most.
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


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model together with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
