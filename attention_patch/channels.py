"""Attention over keys that have lost some of their channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_patch.kernels import ask, by_kv_head, softmax_with_sinks
from press_core.cache.channels import ChannelPrunedLayer
from press_core.model.sites import AttentionSite
from press_core.select import upcast


def attend_channels(
    site: AttentionSite,
    layer: ChannelPrunedLayer,
    _: str | None,
    function: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called in place of an attention function whose keys lie in `layer`.

    Queries are cut to the channels that pruned keys have; the factor on the logits is that of the
    whole head, so that they are those of keys with zeros in the other channels.

    Returns:
        `(B, q, H, d)`, and no weights.

    Raises:
        UnsupportedInputError: for dropout.
    """
    asked = ask(site, query, attention_mask, kwargs)
    grouped = asked.states.unflatten(1, (layer.channels.shape[1], -1))  # (B, H_kv, G, q, d)
    index = layer.channels[:, :, None, None].expand(*grouped.shape[:-1], -1)
    logits = torch.cat(
        (
            grouped.gather(-1, index) @ layer.keys.unsqueeze(2).mT,
            grouped @ layer.recent_keys.unsqueeze(2).mT,
        ),
        dim=-1,
    )
    logits = upcast(logits * asked.scaling)
    if asked.softcap is not None:
        logits = torch.tanh(logits / asked.softcap) * asked.softcap
    if asked.visible is not None:  # of all tokens, or of those that came later
        visible = by_kv_head(asked.visible, layer.channels.shape[1])
        logits[..., logits.shape[-1] - visible.shape[-1] :].masked_fill_(~visible, float("-inf"))
    weights = softmax_with_sinks(logits, asked.sinks)
    output = weights.to(value.dtype) @ layer.values.unsqueeze(2)
    return site.ungrouped(output.flatten(1, 2)).transpose(1, 2).contiguous(), None
