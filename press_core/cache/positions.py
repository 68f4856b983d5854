"""The positions that a layer's keys are rotated to, and the tokens that its rows have seen."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.cache.masks import visible_tokens
from press_core.cache.pruned import PrunedLayer
from press_core.cache.tokens import extended
from press_core.model.sites import AttentionSite


def tokens_seen(layer: PrunedLayer, occupied: Tensor | None) -> tuple[int, ...]:
    """How many tokens of each row `layer` has seen, padding excluded.

    Args:
        occupied: `(B, S)` bool, which slots hold tokens; None: all.
    """
    real = real_tokens(layer, occupied)
    return (layer.n_seen,) * layer.batch if real is None else tuple(real.sum(dim=-1).tolist())


def tokens_held(layer: PrunedLayer, occupied: Tensor | None, n_new: int) -> tuple[int, ...]:
    """How many tokens of each row `layer` holds, apart from those in the last `n_new` slots.

    Args:
        occupied: `(B, S)` bool, which slots hold tokens; None: all.
    """
    n = layer.n_slots - n_new
    return (n,) * layer.batch if occupied is None else tuple(occupied[:, :n].sum(dim=-1).tolist())


def real_tokens(layer: PrunedLayer, occupied: Tensor | None) -> Tensor | None:
    """Which of the tokens that `layer` has seen are not padding, `(B, n_seen)` bool; None: all.

    Args:
        occupied: `(B, S)` bool, which slots hold tokens; None: all. Of a ragged layer, it may cover
            only the newest tokens.
    """
    if occupied is None and layer.kept.real is None:
        return None
    real = torch.ones(layer.batch, layer.n_seen, dtype=torch.bool, device=layer.device)
    if layer.kept.real is not None:
        real[:, : layer.kept.n_seen] = layer.kept.real
    if occupied is not None:  # tokens appended since the last pruning
        end = min(layer.n_slots, occupied.shape[1])  # a press may have added slots
        n_new = min(layer.n_recent, end)
        real[:, layer.n_seen - n_new :] = occupied[:, end - n_new : end]
    return None if bool(real.all()) else real


def rotary_positions(
    layer: PrunedLayer, site: AttentionSite, occupied: Tensor | None, last: Tensor | None
) -> Tensor | None:
    """The position that each key of the layer is rotated to, `(1 or B, 1 or H_kv, S)` int64.

    Args:
        occupied: `(B, S)` bool, which slots hold tokens; None: all.
        last: position of the last token that the layer has seen, `(1 or B,)`.

    Returns:
        None if a press did not report kept positions, or if positions are 3-d (images).
    """
    device = layer.device if last is None else last.device
    real = None if occupied is None else occupied[:, layer.kept.n_slots :].to(device)
    if layer.is_rerotated:
        return layer.all_rotary_positions(real)
    if site.rotary_in_3d is not None:
        return None
    positions = layer.all_positions()
    if positions is None or last is None:
        return None if positions is None else positions.to(device)
    distance = (layer.n_seen - 1 - last)[:, None]
    if real is not None:  # padding between turns takes no positions
        empty = pad((~real).long(), (layer.kept.n_slots, 0))
        n_after = empty.flip(-1).cumsum(dim=-1).flip(-1) - empty
        counted = distance < empty.sum(dim=-1, keepdim=True)  # these positions count padding
        distance = distance - n_after.masked_fill(counted, 0)
    positions = positions.to(device) - distance.unsqueeze(1)
    known = layer.kept.rotary
    if known is None:
        return positions
    return extended(known.to(positions), positions[..., known.shape[-1] :])


def first_position(ids: Tensor | None, mask: Any, layer: PrunedLayer, n_tokens: int) -> Tensor:
    """Position of the first token of a forward that is not padding, `(1 or B,)` int64.

    Where positions count padding, the position of the first token.

    Args:
        ids: the position ids given to the decoder, if any.
        mask: its mask for full attention, in any form, whose last columns are the forward's tokens.
    """
    if ids is None:
        return torch.tensor([int(layer.get_seq_length())], device=layer.device)
    ids = ids if ids.dim() == 2 else ids[0]
    real = visible_tokens(mask, n_tokens, layer.batch)
    if real is None:
        return ids[:, 0]
    # With one token of padding, positions that do not count it are consecutive, too.
    counted = ids[:, -1] - ids[:, 0] == n_tokens - 1
    counted &= ids[:, -1] >= layer.n_seen + n_tokens - 1
    return torch.where(counted, ids[:, 0], ids[:, -1] + 1 - real.sum(dim=-1).to(ids.device))
