"""One mask that serves all pruned layers of a forward, in place of one for each.

It costs a step less than to give every layer its own.
"""

from functools import reduce
from operator import or_

import torch
from torch import Tensor

from press_core.cache import caches, masks, reading
from press_core.cache.pruned import PrunedLayer
from press_core.cache.tokens import ReadingNeeds
from press_core.forward import Arguments, Forward, OneMask
from press_core.model.sites import AttentionSite

SEES_ALL = "sees all"
"""In `Forward.notes`: attention functions of this library need no mask for the one token."""


def one_mask(
    forward: Forward, site: AttentionSite, layers: list[PrunedLayer]
) -> tuple[OneMask | None, Arguments]:
    """Whether the model's one mask can serve all pruned `layers`, though they need help.

    Args:
        site: one of the sites that read them.

    Returns:
        How the mask serves them (None: every layer needs its own mask), and the decoder's
        arguments.
    """
    given, needs = forward.given, reduce(or_, (layer.needs for layer in layers))
    if torch.compiler.is_compiling() or any(layer.is_rerotated for layer in layers):
        return None, given
    if needs & ReadingNeeds.ATTENTION:
        bare = not needs & ReadingNeeds.MASK and all(layer.room is None for layer in layers)
        forward.notes[SEES_ALL] = bare and _is_one_that_sees_all(forward)
        return None, given
    if any(layer.kept.is_padded for layer in layers):
        mask = _mask_of_slots(forward, layers)
        if mask is not None:
            return OneMask.OF_SLOTS, given.replace(attention_mask=mask)
    elif _spreads_a_column(forward, site, layers):
        return OneMask.OF_ONE_COLUMN, given
    return None, given


def _spreads_a_column(forward: Forward, site: AttentionSite, layers: list[PrunedLayer]) -> bool:
    """Whether this is one token that sees everything, in eager attention.

    A mask of one column is then broadcast over the logits of layers of any length.
    """
    spread = masks.form_of(site.attn_implementation) == "eager" and site.signature.hands_on
    spread = spread and caches.mask_layer(forward.cache) in layers and layers[0].room is None
    return spread and _is_one_that_sees_all(forward)


def _is_one_that_sees_all(forward: Forward) -> bool:
    """Whether the forward is of a single token, from which the caller's mask hides nothing."""
    mask = forward.given.get("attention_mask")
    is_2d = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
    return forward.n_tokens == 1 and is_2d and not masks.hides(mask)


def _mask_of_slots(forward: Forward, layers: list[PrunedLayer]) -> Tensor | None:
    """A mask `(B, n_seen + q)` whose last columns say which slots hold tokens; None: not possible.

    All layers must hold the same slots. The columns before those hide tokens such that each row's
    number of visible columns, by which models count positions, stays the same.
    """
    first, q, mask = layers[0], forward.n_tokens, forward.given.get("attention_mask")
    held = {(layer.kept.rows, layer.n_slots, layer.n_seen, layer.room) for layer in layers}
    same = len(held) == 1 and len(layers) == len(forward.cache.layers)
    if not same or not isinstance(mask, Tensor) or mask.shape != (first.batch, first.n_seen + q):
        return None
    if reading.hidden_context(forward) is not None:
        return None
    kept, visible = first.kept, masks.is_visible(mask)
    occupied = kept.occupied(mask.device)
    assert occupied is not None
    n_before = kept.n_seen - kept.n_slots
    n_hidden = visible[:, : kept.n_seen].sum(dim=1) - occupied.sum(dim=1)
    if bool(((n_hidden < 0) | (n_hidden > n_before)).any()):
        return None
    before = torch.arange(n_before, device=mask.device) < n_hidden[:, None]
    columns = torch.cat((before, occupied, visible[:, kept.n_seen :]), dim=1)
    return columns.to(mask.dtype)
