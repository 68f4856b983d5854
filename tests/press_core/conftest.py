"""What the model's own code computes, recorded without any press."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from press_core import AttentionSite, attention_sites
from tests.support import build

BATCH = 2


@dataclass
class Recorded:
    """One forward of the attention module of `site`, eager, over `BATCH` rows."""

    site: AttentionSite
    hidden_states: Tensor
    position_embeddings: tuple[Tensor, Tensor] | None
    collected: list[Tensor] = field(default_factory=list)
    """What `site.query_in` makes of the output of `site.query_module`, per call."""
    before_rope: list[Tensor] = field(default_factory=list)
    """What the modeling module's `apply_rotary_pos_emb` was given as query, per call."""
    query: Tensor = field(default_factory=lambda: torch.empty(0))
    keys: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    """As the attention function received them; `query` and `keys` after RoPE."""
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    """The attention weights that the family's own eager function computed."""


@lru_cache
def _model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return build(family, num_layers=1, dtype=dtype, attn_implementation="eager")


def _record(family: str, length: int, dtype: torch.dtype = torch.float32) -> Recorded:
    model = _model(family, dtype)
    site = attention_sites(model)[0]
    modeling: Any = sys.modules[type(site.module).__module__]
    rotate: Any = getattr(modeling, "apply_rotary_pos_emb", None)
    inside: list[Recorded] = []
    recorded: list[Recorded] = []

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        inside.append(Recorded(site, hidden_states, kwargs.get("position_embeddings")))

    def leave(*_: Any) -> None:
        recorded.append(inside.pop())

    def collect(_: Any, __: Any, output: Tensor) -> None:
        inside[-1].collected.append(site.query_in(output))

    def rotary(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        for record in inside:
            record.before_rope.append(q)
        return rotate(q, *args, **kwargs)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        output, weights = modeling.eager_attention_forward(module, query, key, value, *args, **kw)
        for record in inside:
            record.query, record.keys, record.values = query, key, value
            record.weights = weights
        return output, weights

    handles = [
        site.module.register_forward_pre_hook(enter, with_kwargs=True),
        site.module.register_forward_hook(leave),
        site.query_module.register_forward_hook(collect),
    ]
    ALL_ATTENTION_FUNCTIONS["eager"] = attention
    if rotate is not None:
        modeling.apply_rotary_pos_emb = rotary
    try:
        ids = torch.randint(3, 128, (BATCH, length), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model(ids)
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]
        if rotate is not None:
            modeling.apply_rotary_pos_emb = rotate
        for handle in handles:
            handle.remove()
    (only,) = recorded
    return only


@pytest.fixture(scope="session")
def record() -> Callable[..., Recorded]:
    """`record(family, length, dtype=float32)`: see `Recorded`."""
    return _record
