"""A prefill made of drawn numbers, for formulas against slow references."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from press_core import AttentionCall, AttentionSite, attention_sites
from press_core.learned.calibration import Calibration
from press_core.observed import Positions, Query
from tests.support import build

BATCH, HEADS, KV_HEADS, GROUP, DIM, WIDTH, LAYERS = 2, 4, 2, 2, 8, 32, 3
F = TypeVar("F", bound=Calibration)
KV = list(itertools.product(range(BATCH), range(KV_HEADS)))
"""Each KV head of each row."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@cache
def site(layer: int = 0) -> AttentionSite:
    """An attention module of a small Llama."""
    model = build("llama", num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    return attention_sites(model)[layer]


def called(
    query: Tensor | None = None,
    query_is_rotated: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    position_ids: Tensor | None = None,
    rotary_positions: Tensor | None = None,
    **fields: Any,
) -> AttentionCall:
    """A call with a query `(B, H, q, d)`, as it is before RoPE or after it."""
    return AttentionCall(
        query=None if query is None else Query(query, query_is_rotated),
        at=Positions(position_embeddings, position_ids, rotary=rotary_positions),
        **fields,
    )


def drawn_call(
    length: int,
    seed: int = 0,
    batch: int = BATCH,
    dtype: torch.dtype = torch.float64,
    scale: float = 1.0,
    **fields: Any,
) -> AttentionCall:
    """A prefill; the query is given as it is before RoPE, unless `query_is_rotated` is among them.

    Args:
        fields: what is not drawn, see `called`.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        states = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
        return (scale * states).to(dtype)

    positions = torch.arange(length)[None]
    rotary = site().rotary
    assert rotary is not None
    known = {
        "site": site(),
        "hidden_states": draw(length, WIDTH),
        "keys": draw(KV_HEADS, length, DIM),
        "values": draw(KV_HEADS, length, DIM),
        "query": draw(HEADS, length, DIM),
        "position_embeddings": rotary.embeddings(torch.zeros(1, dtype=dtype), positions),
        "position_ids": positions,
    }
    return called(**{**known, **fields})


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
    assert not call.query.is_rotated
    query = rotated(call.query.states[row, head, token], token)
    keys = call.keys[row, head // GROUP, : token + 1]
    logits = torch.stack([key @ query for key in keys]) * call.site.scaling
    cap = call.site.softmax.softcap
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    weights = (logits - logits.max()).exp()
    beside = 0 if call.site.sinks is None else (call.site.sinks[head] - logits.max()).exp()
    return weights / (weights.sum() + beside)


# ---- what presses have learned -------------------------------------------------------------------


def fitted(kind: type[F], *names: str, **sizes: int) -> F:
    """Something learned, of drawn numbers, about the model of `site`.

    Args:
        names: the tensors that it has; none: all of them.
        sizes: others than those of the model.
    """
    model = {"layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    known = {**model, "hidden_size": WIDTH, "width": 5, **sizes}
    dims = {field.name: field.metadata["dims"].split() for field in fields(kind)}
    shapes = {name: dims[name] for name in names or dims}
    drawn_with = enumerate(shapes.items())
    return kind(**{n: drawn(*[known[x] for x in of], seed=seed) for seed, (n, of) in drawn_with})


@dataclass
class Prepared:
    """Stands for an open scope whose press has prepared `known`."""

    known: Any
    sites: tuple[AttentionSite, ...] = ()

    def prepared(self, press: Any) -> Any:
        return self.known
