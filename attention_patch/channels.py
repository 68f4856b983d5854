"""Attention over keys that have lost some of their channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attention_patch.backends import capped, refuse_dropout, softmax_with_sinks
from press_core.errors import UnsupportedInputError
from press_core.layers import ChannelLayer
from press_core.sites import AttentionSite


def attend_channels(
    site: AttentionSite,
    layer: ChannelLayer,
    function: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called in place of an attention function whose keys lie in `layer`.

    Queries are cut to the channels that pruned keys have; the factor on the logits is that of the
    whole head, so that they are those of keys with zeros in the other channels.

    Returns:
        `(B, q, H, d)`, and no weights.

    Raises:
        UnsupportedInputError: for dropout, and for masks of flex attention.
    """
    refuse_dropout(kwargs)
    if isinstance(attention_mask, BlockMask):
        raise UnsupportedInputError(
            "attention over keys with some channels takes no mask of flex_attention; load the "
            'model with attn_implementation="sdpa"'
        )
    scaling, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
    scaling = site.scaling if scaling is None else scaling
    grouped = query.unflatten(1, (layer.channels.shape[1], -1))  # (B, H_kv, G, q, d)
    index = layer.channels[:, :, None, None].expand(*grouped.shape[:-1], -1)
    logits = torch.cat(
        (
            grouped.gather(-1, index) @ layer.keys.unsqueeze(2).mT,
            grouped @ layer.recent_keys.unsqueeze(2).mT,
        ),
        dim=-1,
    )
    logits = capped(logits, scaling, site.softcap)
    logits = logits + _bias(attention_mask, logits)
    weights = softmax_with_sinks(logits, site.sinks if sinks is None else sinks)
    output = weights.to(value.dtype) @ layer.values.unsqueeze(2)
    return output.flatten(1, 2).transpose(1, 2).contiguous(), None


def _bias(mask: Tensor | None, logits: Tensor) -> Tensor:
    """What to add to `logits` `(B, H_kv, G, q, n)`: minus infinity where a key is not visible."""
    q, n = logits.shape[-2:]
    causal = torch.ones(q, n, dtype=torch.bool, device=logits.device).tril(n - q)
    if mask is None:
        visible = causal[None, None, None]
    elif mask.dim() == 2:
        visible = (mask[:, None, -n:].bool() & causal)[:, None, None]
    else:
        visible = (mask if mask.dtype == torch.bool else mask >= 0).unsqueeze(2)
    return torch.zeros_like(logits[:1, :1, :1]).masked_fill(~visible, float("-inf"))
