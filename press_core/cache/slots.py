"""Slots of pruned layers: which hold tokens, and what it takes to read them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from press_core.cache import caches, masks
from press_core.cache.pruned import PrunedLayer
from press_core.cache.tokens import ReadingNeeds
from press_core.forward import Forward
from press_core.model.rotary import NoRotation
from press_core.model.sites import AttentionSite

MASKED = "masked"
"""In `Forward.notes`: the `Masked` of the forward."""


class Masked(NamedTuple):
    """The pruned layer that the model builds its mask for, before the layers run.

    Attributes:
        n_old: mask columns of its pruned part.
        n_seen: tokens seen up to its last pruning.
        n_counted: tokens appended after pruning, before this forward; a tensor in a buffer.
        columns: of the mask.
        shift: see `Kept`; the model counts this many tokens fewer.
    """

    n_old: int
    n_seen: int
    n_counted: Any
    columns: int
    shift: int


def note_masked(forward: Forward) -> None:
    """Note which layer the model builds its mask for: it may be pruned before others are read."""
    layer = caches.mask_layer(forward.cache)
    if isinstance(layer, PrunedLayer):
        kept, columns = layer.kept, layer.columns(forward.n_tokens)
        noted = Masked(layer.n_old, kept.n_seen, layer.n_counted, columns, kept.shift)
        forward.notes[MASKED] = noted


def update_needs(cache: Any, sites: list[AttentionSite]) -> None:
    """Find anew what reading the pruned layers of `sites` takes: it depends on the first layer."""
    for site in sites:
        layer = cache.layers[site.layer_idx] if site.layer_idx < len(cache.layers) else None
        if isinstance(layer, PrunedLayer) and layer.is_pruned:
            first = caches.mask_layer(cache)
            layer.needs, layer.is_first = _reading_needs(layer, first, site), layer is first


def _reading_needs(layer: PrunedLayer, first: Any, site: AttentionSite) -> ReadingNeeds:
    needs = layer.needs & ReadingNeeds.ATTENTION
    if layer.kept.is_padded:
        needs |= ReadingNeeds.MASK
    if not share_a_mask(layer, first):
        masked = site.signature.masks_one or layer.room is not None
        needs |= ReadingNeeds.MASK if masked else ReadingNeeds.MASK_OF_MANY
    shift = first.kept.shift if isinstance(first, PrunedLayer) else 0
    if has_own_positions(layer, shift, site) or (layer.is_rerotated and site.place.keeps_count):
        needs |= ReadingNeeds.MASK
    return needs


def has_own_positions(layer: PrunedLayer, shift: int, site: AttentionSite) -> bool:
    """Whether the model, which counts `shift` tokens fewer than it has seen, miscounts `layer`."""
    return layer.kept.shift != shift and not isinstance(site.rotary, NoRotation)


def share_a_mask(layer: PrunedLayer, first: Any) -> bool:
    """Whether a mask over the (filled) slots of the `first` layer fits both."""
    pruned = caches.as_pruned(first)
    n_columns = int(first.get_seq_length()) + 1 if pruned is None else pruned.columns(1)
    if layer.columns(1) != n_columns:
        return False
    return layer.room is None or pruned is None or layer.n_slots == pruned.n_slots


def filled_columns(mask: Any, layer: PrunedLayer, n_new: int = 0) -> Any:
    """A mask without the columns of slots that are still empty after `n_new` more tokens."""
    columns = layer.columns(n_new)
    n_empty = columns - layer.n_old - layer.n_recent - n_new
    if n_empty <= 0 or mask is None or mask.shape[-1] not in (columns, columns - layer.n_old):
        return mask
    return masks.part_of(mask, 0, mask.shape[-1] - n_empty)


def occupied_slots(mask: Any, layer: PrunedLayer, n_tokens: int, n_held: int) -> Tensor | None:
    """Which slots of a layer hold a token (neither empty nor padding), `(B, S)` bool; None: all.

    Args:
        mask: the forward's attention mask, in any form.
        n_tokens: tokens of the forward.
        n_held: how many of them the layer holds already: none before its attention, all after it.
    """
    n_recent, old = layer.n_recent, layer.kept.occupied(layer.device)
    recent = masks.visible_tokens(mask, n_recent + n_tokens - n_held, layer.batch)
    recent = None if recent is None or bool(recent[:, :n_recent].all()) else recent[:, :n_recent]
    if old is None and recent is None:
        return None
    filled = [
        torch.ones(layer.batch, n, dtype=torch.bool) if part is None else part
        for part, n in ((old, layer.n_old), (recent, n_recent))
    ]
    return torch.cat([part.to(layer.device) for part in filled], dim=-1)
