"""Second readings of a context, worked out slowly: queries, keys and weights one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.press_core.drawn import rotated
from tests.support import build

Reading = tuple[list[Tensor], DynamicCache]
"""Inputs of the attention modules `(m, D)`, and the cache over the context and the reading."""


@torch.no_grad()
def read(model: Any, context: Tensor, then: Tensor) -> Reading:
    """Run a context `(S,)`, and then what comes after it `(m,)`."""
    cache, inputs = DynamicCache(config=model.config), []
    model(context[None], past_key_values=cache)
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kwargs: inputs.append(kwargs["hidden_states"][0]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    model(then[None], past_key_values=cache)
    for handle in handles:
        handle.remove()
    return inputs, cache


def weights(
    model: Any,
    reading: Reading,
    layer: int,
    head: int,
    query: int,
    length: int,
    seen: Sequence[int],
) -> dict[int, float]:
    """What one query of one head pays to each of the keys `seen`, before itself.

    Args:
        query: which token of what was read after the context of `length` tokens.
    """
    inputs, cache = reading
    attention, keys = model.model.layers[layer].self_attn, cache.layers[layer].keys[0]
    d, group = attention.head_dim, attention.num_key_value_groups
    projected = attention.q_proj.weight.detach()[head * d : (head + 1) * d] @ inputs[layer][query]
    turned = rotated(projected, length + query)
    visible = [key for key in seen if key <= length + query]
    logits = [float(turned @ keys[head // group, key]) / math.sqrt(d) for key in visible]
    largest = max(logits)
    terms = [math.exp(logit - largest) for logit in logits]
    return {key: term / sum(terms) for key, term in zip(visible, terms, strict=True)}


def float64_llama(**options: Any) -> Any:
    """Two layers, four query and two KV heads; norms that do not round to float32."""
    model = build(
        "llama", num_layers=2, num_heads=4, num_kv_heads=2, dtype=torch.float64, **options
    )
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = partial(_norm, module)
    return model


def _norm(module: Any, states: Tensor) -> Tensor:
    scale = (states.square().mean(dim=-1, keepdim=True) + module.variance_epsilon).rsqrt()
    return module.weight * states * scale
