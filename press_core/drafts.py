"""A context and drafts behind it in one forward: run as two, so that drafts are no context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from press_core.cache.caches import mask_columns
from press_core.cache.masks import mask_for_pruned
from press_core.model.forward import AttentionForward
from press_core.model.generation import Part, as_part

_PER_TOKEN = {"hidden_states": 1, "position_ids": -1, "cache_position": 0}
"""Arguments of an attention forward that have a row for each token, and the dimension."""


def after_context(forward: AttentionForward, n_drafts: int) -> AttentionForward:
    """Run the module of `forward` on all but its last tokens.

    Returns:
        The forward of those last tokens, which remembers what the module returned.
    """
    n = forward.n_tokens - n_drafts
    context, drafts = _tokens(forward, 0, n), _tokens(forward, n, forward.n_tokens)
    mask = forward.argument("attention_mask")
    context = context.with_argument("attention_mask", _mask_of_first(mask, n))
    with as_part(Part(beside_drafts=True)):
        output = forward.site.module(*context.args, **context.kwargs)
    drafts = drafts.with_argument("attention_mask", _mask_of_rest(mask, n, drafts))
    return replace(drafts, context_output=output)


def rest_of(forward: AttentionForward) -> Any:
    """Run the module on the tokens behind the context too; returns its output of both."""
    with as_part(Part(beside_drafts=True)):
        output = forward.site.module(*forward.args, **forward.kwargs)
    return with_context(forward.context_output, output)


def with_context(context: Any, output: Any) -> Any:
    """The output of a forward and of the `context` that was run before it, as of one."""
    if context is None:
        return output
    if isinstance(output, Tensor):
        return torch.cat((context, output), dim=1)
    joined = torch.cat((context[0], output[0]), dim=1)
    return (joined, *(None for _ in output[1:]))  # weights over different keys are no one tensor


def _tokens(forward: AttentionForward, start: int, stop: int) -> AttentionForward:
    for name, dim in _PER_TOKEN.items():
        states = forward.argument(name)
        if isinstance(states, Tensor):
            forward = forward.with_argument(name, states.narrow(dim, start, stop - start))
    cos_sin = forward.argument("position_embeddings")
    if cos_sin is None:
        return forward
    parts = tuple(x.narrow(-2, start, stop - start) for x in cos_sin)
    return forward.with_argument("position_embeddings", parts)


def _mask_of_first(mask: Any, n: int) -> Any:
    """The mask of the first `n` of as many queries as keys."""
    if mask is None:
        return None
    if isinstance(mask, BlockMask):
        device = str(mask.kv_num_blocks.device)
        return create_block_mask(mask.mask_mod, mask.shape[0], None, n, n, device=device)
    return mask[:, :n] if mask.dim() == 2 else mask[..., :n, :n]


def _mask_of_rest(mask: Any, n: int, drafts: AttentionForward) -> Any:
    """The mask of the queries behind the first `n`, as the model makes it for that layer."""
    if mask is not None and not isinstance(mask, BlockMask):
        return mask if mask.dim() == 2 else mask[..., n:, :]
    n_drafts, states = drafts.n_tokens, drafts.hidden_states
    held = torch.ones(
        len(states), mask_columns(drafts.layer), dtype=torch.bool, device=states.device
    )
    form = drafts.site.attn_implementation
    return mask_for_pruned(None, held, n_drafts, states, form)
