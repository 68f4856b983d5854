"""What the training of every shipped model has in common: options, updates, model cards."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor
from transformers import PreTrainedModel

Output = Annotated[Path, typer.Option(help="Folder for the trained model; made if absent.")]
Seed = Annotated[int, typer.Option(help="Decides the initial weights and every batch.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; by default torch's own choice.")]

_CARDS = Path(__file__).parent / "cards"


def set_threads(threads: int | None) -> None:
    """Train on so many CPU threads; None: as many as torch chooses."""
    if threads is not None:
        torch.set_num_threads(threads)


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float
) -> None:
    """One step down the gradient of `loss` at the learning rate `rate`, gradients clipped to 1."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def write_card(name: str, folder: Path, run: Any, figures: Mapping[str, Any]) -> None:
    """Write the model card, ``README.md``, of the model in ``folder``.

    Args:
        name: of the card in ``cards``.
        run: how the model was trained.
        figures: what else the card says, by name.
    """
    versions = {
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    card = (_CARDS / f"{name}.md").read_text(encoding="utf-8")
    text = card.format(run=run, **versions, **figures)
    (folder / "README.md").write_text(text, encoding="utf-8")
