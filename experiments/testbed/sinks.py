"""Attention sinks: what each head pays the first tokens of a text, measured, shown and drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pandas as pd
import torch
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from experiments.framework.heatmap import draw_cells
from experiments.framework.plots import new_figure, style
from experiments.framework.tables import ResultTable
from press_core import attention_sites

_PALE_TO_STRONG = LinearSegmentedColormap.from_list("attention", ["#f4f6f8", "#0072B2"])


@torch.inference_mode()
def attention_to_first(model: PreTrainedModel, tokens: Tensor, n_first: int = 1) -> pd.DataFrame:
    """What queries in the later half of sequences pay the first tokens, head by head.

    Args:
        tokens: `(rows, length)` int64, without padding.
        n_first: how many first tokens are counted together.

    Returns:
        Columns `layer`, `head`; `n_first`; `share` of a head's attention; `even`, what the first
        tokens would get if all tokens got the same. Layers without attention are left out.
    """
    length = tokens.shape[1]
    later = torch.arange(length // 2, length)
    even = float((n_first / (later + 1)).mean())
    rows = []

    def note(layer: int, output: Any) -> None:
        paid = output[1][:, :, later, :n_first].float().sum(-1).mean((0, 2))  # (H,)
        for head, share in enumerate(paid.tolist()):
            rows.append((layer, head, n_first, share, even))

    with eager(model), ExitStack() as hooks:  # output_attentions=True would leave hooks behind
        for site in attention_sites(model):
            handle = site.module.register_forward_hook(
                lambda _, __, output, layer=site.layer_idx: note(layer, output)
            )
            hooks.callback(handle.remove)
        model(input_ids=tokens.to(model.device), use_cache=False)
    return pd.DataFrame(rows, columns=["layer", "head", "n_first", "share", "even"])


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    """The one attention implementation that returns weights, for as long as the block lasts."""
    former = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(former)


def heads_table(attention: pd.DataFrame) -> ResultTable:
    """Shares by layer (rows) and head (columns)."""
    n_first, even = int(attention["n_first"].iloc[0]), attention["even"].iloc[0]
    tokens = "token" if n_first == 1 else f"{n_first} tokens together"
    note = (
        f"Attention of the later half of a window to its first {tokens}, by layer and head; spread "
        f"evenly it would be {even:.1%}:"
    )
    shares = _by_head(attention)
    rows = [[f"layer {layer}", *map(_percent, line)] for layer, line in shares.iterrows()]
    return ResultTable(note, ["", *(f"head {head}" for head in shares.columns)], rows)


def heads_figure(attention: pd.DataFrame) -> Figure:
    """Shares by layer (rows) and head (columns), darker where they are larger."""
    shares = _by_head(attention)
    cells = {
        (f"layer {layer}", f"head {head}"): (_percent(share), to_hex(_PALE_TO_STRONG(share)))
        for layer, line in shares.iterrows()
        for head, share in line.dropna().items()
    }
    rows, columns = ([f"{axis.name} {i}" for i in axis] for axis in (shares.index, shares.columns))
    with style():
        width, height = 1.6 + 0.7 * len(columns), 1.1 + 0.35 * len(rows)
        figure, (panel,) = new_figure(width=width, height=height)
        draw_cells(panel, rows, columns, cells)
    figure.set_label("Attention of each head to the first tokens, by layer and head")
    return figure


def _by_head(attention: pd.DataFrame) -> pd.DataFrame:
    return attention.pivot_table(index="layer", columns="head", values="share")


def _percent(share: float) -> str:
    return "" if pd.isna(share) else f"{share:.0%}"
