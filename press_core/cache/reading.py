"""Reading a pruned cache: what a forward needs of mask and positions, whoever pruned it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from press_core.cache.caches import mask_columns, mask_layer, model_clock
from press_core.cache.masks import mask_for_pruned, prefill_tokens, visible_tokens
from press_core.cache.pruned import PrunedLayer, Reader, ReadingNeeds
from press_core.errors import UnsupportedInputError
from press_core.model.forward import AttentionForward, DecoderForward
from press_core.model.rotary import alike
from press_core.model.sites import AttentionSite


def prepared(forward: AttentionForward, reader: Reader) -> AttentionForward:
    """The forward with a mask and positions that fit the pruned layer which it is about to read.

    Args:
        reader: who stands up for it: the layer lets itself be read while that is open.
    """
    layer = layer_of(forward)
    if not isinstance(layer, PrunedLayer) or layer.get_seq_length() == 0:
        return forward
    layer.allow_update(reader)
    return _with_mask(_with_positions(forward, layer), layer)


def prepared_reader(forward: AttentionForward, owner: Any) -> AttentionForward:
    """The forward of a module that attends over the layer of another, which has run already.

    Args:
        owner: that layer, which holds the tokens of the forward.
    """
    held = forward.n_tokens
    if not isinstance(owner, PrunedLayer) or owner.n_seen == held:  # its prefill
        return forward
    return _with_positions(_with_mask(forward, owner, held), owner, held)


def with_columns_of_clock(forward: DecoderForward) -> DecoderForward:
    """The forward with a mask as long as the model counts, where rerotated keys set it back.

    The model takes the first columns of a longer mask, one of all tokens. The last ones are those
    of the tokens that came after the pruning. Before them stands what is kept of a context without
    padding, or the layer has a mask of its own for it.

    Raises:
        UnsupportedInputError: if the mask hides tokens of such a context.
    """
    cache, mask = forward.cache, forward.argument("attention_mask")
    turned = [
        layer
        for layer in getattr(cache, "layers", ())
        if isinstance(layer, PrunedLayer) and layer.get_seq_length() != layer.n_seen
    ]
    if not turned or not isinstance(mask, Tensor) or mask.dim() != 2:
        return forward
    n_columns = model_clock(cache) + forward.n_tokens
    if mask.shape[1] <= n_columns:
        return forward
    layer = turned[0]
    n_recent = layer.n_recent + forward.n_tokens
    if not layer.kept.padded and not bool(mask[:, : mask.shape[1] - n_recent].all()):
        raise UnsupportedInputError(
            f"the attention_mask hides some of the {layer.kept.n_seen} tokens before the pruning, "
            "which had no padding, and it is not known which keys they became; let it hide padding "
            "in what came later only"
        )
    return forward.with_argument("attention_mask", mask[:, -n_columns:])


def reading_needs(cache: Any, layer: PrunedLayer, site: AttentionSite) -> ReadingNeeds:
    """What the forwards to come need to read `layer` of `site`, which `cache` holds already."""
    needs = ReadingNeeds.NOTHING
    if layer.kept.padded:
        needs |= ReadingNeeds.MASK
    if layer.n_slots != mask_columns(mask_layer(cache)):
        # Of those that transformers has, these alone can do without a mask for a single token.
        unmasked_steps = site.attn_implementation.startswith(("sdpa", "flash"))
        needs |= ReadingNeeds.MASK_OF_MANY if unmasked_steps else ReadingNeeds.MASK
    if layer.rerotation is not None:
        keeps_clock = layer.kept.padded or site.keeps_clock
        if keeps_clock or model_clock(cache) != layer.get_seq_length():
            needs |= ReadingNeeds.POSITIONS
    return needs


def layer_of(forward: AttentionForward) -> Any:
    """The cache layer of a forward; None where it has none, or none yet."""
    cache = forward.cache
    return forward.layer if hasattr(cache, "layers") else None


def _with_mask(forward: AttentionForward, layer: PrunedLayer, n_held: int = 0) -> AttentionForward:
    """The forward with a mask that fits a layer pruned before.

    The model builds one mask for all layers, from the uncompressed columns; it fits neither rows of
    different lengths nor layers of different lengths.

    Args:
        n_held: how many of the forward's tokens the layer holds already.
    """
    mask = forward.argument("attention_mask")
    n_keys = layer.n_slots + forward.n_tokens - n_held
    if not layer.kept.padded and (mask is None or mask.shape[-1] == n_keys):
        return forward
    occupied, n_recent = layer.occupied(), n_keys - layer.kept.n_slots
    form = forward.site.attn_implementation
    mask = mask_for_pruned(mask, occupied, n_recent, forward.hidden_states, form)
    return forward.with_argument("attention_mask", mask)


def _with_positions(
    forward: AttentionForward, layer: PrunedLayer, n_held: int = 0
) -> AttentionForward:
    """The forward with positions that continue from where the keys were rerotated to."""
    if layer.rerotation is None:
        return forward
    hidden_states, row_lag = forward.hidden_states, layer.rerotation.row_lag
    n_recent = layer.n_recent - n_held + forward.n_tokens
    start = layer.kept.n_seen - layer.rerotation.shift
    positions = torch.arange(start, start + n_recent, device=hidden_states.device)[None]
    real = visible_tokens(forward.argument("attention_mask"), n_recent, len(hidden_states))
    if real is not None:  # padding between turns has no position
        positions = (start - 1 + real.to(positions.device).cumsum(dim=-1)).clamp(min=0)
    if row_lag is not None:
        positions = positions - row_lag[:, None]
    positions = positions[:, -forward.n_tokens :]
    given = forward.position_ids
    if given is not None and torch.equal(given.expand_as(positions), positions):
        return forward
    rotary = forward.site.rotary
    assert rotary is not None
    if rotary.in_3d and forward.n_tokens > 1:
        n_seen = layer.n_seen - n_held + forward.n_tokens
        _require_text(forward, n_seen, None if real is None else real[:, -forward.n_tokens :])
    embeddings = rotary.embeddings(hidden_states, positions)
    forward = forward.with_argument("position_embeddings", embeddings)
    in_all = forward.argument("position_ids")
    if in_all is None:
        return forward
    positions = positions if in_all.dim() == 2 else positions.expand(len(in_all), *positions.shape)
    return forward.with_argument("position_ids", positions)


def _require_text(forward: AttentionForward, n_seen: int, real: Tensor | None) -> None:
    """Refuse tokens whose positions differ in their dimensions, behind keys at other positions.

    Args:
        n_seen: tokens up to the last of the forward.
        real: `(B, q)` bool, which tokens of the forward are no padding; None: all.

    Raises:
        UnsupportedInputError: if there are such tokens.
    """
    given, rotary = forward.cos_sin, forward.site.rotary
    if given is None or rotary is None:
        return
    batch, n = len(given[0]), forward.n_tokens
    real = given[0].new_ones(batch, n).bool() if real is None else real.to(given[0].device)
    last = rotary.find(given[0][:, -1:], given[1][:, -1:], n_seen)
    behind = real.flip(-1).long().cumsum(dim=-1).flip(-1) - 1
    made = rotary.embeddings(given[0], (last[:, None] - behind).clamp(min=0))
    is_text = alike(made[0], given[0]) & alike(made[1], given[1]) & (last[:, None] >= 0)
    if not bool((is_text | ~real).all()):
        raise UnsupportedInputError(
            f"an image came to {forward.site.name} behind keys that were rotated to other "
            "positions, where it has none; put it into the context, or use a press that does not "
            "rotate keys"
        )


def occupied_slots(forward: AttentionForward, n_new: int) -> Tensor | None:
    """Which slots of the layer of a forward hold tokens of that row, `(B, S)` bool; None: all.

    Args:
        n_new: how many of the forward's tokens the layer holds already: none before it, `q` after.
    """
    layer, mask = forward.layer, forward.argument("attention_mask")
    batch = forward.hidden_states.shape[0]
    pruned = isinstance(layer, PrunedLayer) and layer.is_pruned
    n_recent = layer.n_recent if pruned else layer.get_seq_length()
    if not pruned and n_recent == n_new:
        return prefill_tokens(mask, n_recent, batch)
    behind = forward.n_tokens - n_new  # columns of tokens that are not there yet
    recent = visible_tokens(mask, n_recent + behind, batch)
    recent = None if recent is None else recent[:, :n_recent]
    if not pruned:
        return None if recent is None or bool(recent.all()) else recent
    if not layer.kept.padded and recent is None:
        return None
    if recent is None:
        recent = torch.ones(batch, n_recent, dtype=torch.bool, device=layer.device)
    return torch.cat((layer.occupied(), recent.to(layer.device)), dim=-1)


def first_position(forward: AttentionForward) -> Tensor:
    """Position of the first token of a forward that is no padding, `(1 or B,)` int64.

    Where positions count padding, that of the first token.
    """
    ids, n_tokens = forward.position_ids, forward.n_tokens
    if ids is None:
        seen = forward.layer.get_seq_length()
        return torch.tensor([seen], device=forward.hidden_states.device)
    real = visible_tokens(forward.argument("attention_mask"), n_tokens, len(forward.hidden_states))
    if real is None:
        return ids[:, 0]
    counted = ids[:, -1] - ids[:, 0] == n_tokens - 1
    return torch.where(counted, ids[:, 0], ids[:, -1] + 1 - real.sum(dim=-1).to(ids.device))
