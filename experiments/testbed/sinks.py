"""Attention sinks: what each head pays the first token of a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from press_core import attention_sites


@torch.inference_mode()
def attention_to_first(model: PreTrainedModel, tokens: Tensor) -> pd.DataFrame:
    """What queries in the later half of sequences pay the first token, head by head.

    Args:
        tokens: `(rows, length)` int64, without padding.

    Returns:
        Columns `layer`, `head`, and `share` of its attention. Layers without attention are left
        out.
    """
    rows: list[dict[str, Any]] = []

    def note(layer: int, weights: Tensor) -> None:
        paid = weights[:, :, tokens.shape[1] // 2 :, 0].float().mean((0, 2))  # (H,)
        for head, share in enumerate(paid.tolist()):
            rows.append({"layer": layer, "head": head, "share": share})

    with eager(model), ExitStack() as hooks:  # output_attentions=True would leave hooks behind
        for site in attention_sites(model):
            handle = site.module.register_forward_hook(
                lambda _, __, output, layer=site.layer_idx: note(layer, output[1])
            )
            hooks.callback(handle.remove)
        model(input_ids=tokens.to(model.device), use_cache=False)
    return pd.DataFrame(rows)


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    """The one attention implementation that returns weights, for as long as the block lasts."""
    former = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(former)
