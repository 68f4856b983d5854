"""A prefill made of drawn numbers, for formulas against slow references."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from press_core import AttentionCall, AttentionSite, attention_sites
from tests.support import build

BATCH, HEADS, KV_HEADS, GROUP, DIM = 2, 4, 2, 2, 8


@cache
def site() -> AttentionSite:
    """The attention of a small Llama."""
    model = build("llama", num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    return attention_sites(model)[0]


def drawn_call(length: int, seed: int = 0, batch: int = BATCH, **fields: Any) -> AttentionCall:
    """A prefill in float64; the query is given as it is before RoPE."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)

    positions = torch.arange(length)[None]
    rotary = site().rotary
    assert rotary is not None
    known = {
        "hidden_states": draw(length, HEADS * DIM),
        "keys": draw(KV_HEADS, length, DIM),
        "values": draw(KV_HEADS, length, DIM),
        "query": draw(HEADS, length, DIM),
        "position_embeddings": rotary.embeddings(torch.zeros(1, dtype=torch.float64), positions),
        "position_ids": positions,
    }
    return AttentionCall(site=site(), **{**known, **fields})


def rotated(x: Tensor, position: int) -> Tensor:
    """RoPE of one state `(d,)`, channels paired by halves, theta 10,000."""
    half = len(x) // 2
    turned = torch.empty_like(x)
    for i in range(half):
        angle = torch.tensor(position * 10000.0 ** (-2 * i / len(x)), dtype=torch.float64)
        a, b = x[i], x[half + i]
        turned[i] = a * angle.cos() - b * angle.sin()
        turned[half + i] = a * angle.sin() + b * angle.cos()
    return turned


def attention_row(call: AttentionCall, row: int, head: int, token: int) -> Tensor:
    """What the query of `token` puts on each of the keys up to its own, `(token + 1,)`."""
    assert call.query is not None
    query = rotated(call.query[row, head, token], token)
    keys = call.keys[row, head // GROUP, : token + 1]
    logits = torch.stack([key @ query for key in keys]) * DIM**-0.5
    weights = (logits - logits.max()).exp()
    return weights / weights.sum()
