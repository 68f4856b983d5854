"""What every mechanism does around an attention forward: fit the mask before, prune after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from press_core.caches import PrunedLayer, check_prunable, mask_layer, prunable_layer
from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.masks import mask_for_pruned, padding
from press_core.sites import AttentionSite

Compress = Callable[[AttentionCall], tuple[Tensor, Tensor]]
"""From a call to the keys and values that stay, each `(B, H_kv, n, d)`."""


_SAY_WHAT_IS_KEPT = (
    "let its compress return what AttentionCall.keep(positions) gives, or write it as a ScorerPress"
)


class _Part(NamedTuple):
    rows: list[int]
    keys: Tensor
    values: Tensor
    positions: Tensor | None


def fit_mask(
    site: AttentionSite, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of an attention forward with a mask that fits a layer pruned before.

    The model builds one mask for all layers, from the uncompressed columns; it fits neither rows of
    different lengths nor layers of different lengths.

    Returns:
        New arguments, or None where the given ones fit.

    Raises:
        UnsupportedCacheError: if the cache is of a kind that cannot be pruned.
    """
    cache = site.cache(args, kwargs)
    if cache is None:
        return None
    check_prunable(cache, site.layer_idx)
    layer = cache.layers[site.layer_idx] if site.layer_idx < len(cache.layers) else None
    if not isinstance(layer, PrunedLayer) or layer.n_slots == 0:
        return None
    layer.expect_mask()
    hidden_states = site.argument("hidden_states", args, kwargs)
    mask = site.argument("attention_mask", args, kwargs)
    n_keys = layer.n_slots + hidden_states.shape[1]
    if not layer.padded and (mask is None or mask.shape[-1] == n_keys):
        return None
    occupied, n_recent = layer.occupied(), n_keys - layer.n_pruned
    mask = mask_for_pruned(mask, occupied, n_recent, hidden_states, site.attn_implementation)
    return site.replace_argument("attention_mask", mask, args, kwargs)


def is_prefill(cache: Any, layer_idx: int, n_tokens: int) -> bool:
    """Whether the layer held nothing before the forward of `n_tokens` that has just ended."""
    return bool(cache.layers[layer_idx].get_seq_length() == n_tokens)


def observe(
    site: AttentionSite,
    cache: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    query: Tensor | None,
    query_is_rotated: bool,
) -> AttentionCall:
    """The call that has just ended, seen from its arguments, its output and the cache it filled.

    Raises:
        UnsupportedInputError: if an inner scope pruned the layer and did not say what it kept, so
            that nobody knows which queries and positions its keys belong to.
    """
    layer = prunable_layer(cache, site.layer_idx)
    if _is_pruned(layer) and layer.positions is None:
        raise UnsupportedInputError(
            f"the press of an inner scope pruned {site.name} without saying which tokens it kept; "
            f"open that scope outermost, or {_SAY_WHAT_IS_KEPT}"
        )
    hidden_states = site.argument("hidden_states", args, kwargs)
    weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    tokens = layer.positions if isinstance(layer, PrunedLayer) else None
    device = hidden_states.device  # an offloaded cache is brought back to where the model computes
    return AttentionCall(
        site=site,
        hidden_states=hidden_states,
        keys=layer.keys.to(device),
        values=layer.values.to(device),
        attentions=weights if tokens is None and isinstance(weights, Tensor) else None,
        position_embeddings=site.argument("position_embeddings", args, kwargs),
        position_ids=site.argument("position_ids", args, kwargs),
        query=query,
        query_is_rotated=query_is_rotated,
        tokens=None if tokens is None else tokens.long().to(device),
    )


def prune(call: AttentionCall, cache: Any, mask: Any, compress: Compress) -> None:
    """Let `compress` choose, for the rows of each padding apart, and store what it keeps.

    Args:
        call: the prefill that has just ended.
        cache: the cache that it filled.
        mask: the attention mask that the module was given.
    """
    layer = prunable_layer(cache, call.site.layer_idx)
    empty = _empty_slots(layer, mask, call)
    parts, changed = [], False
    for rows, start, part in call.parts(empty):
        keys, values = compress(part)
        changed |= keys is not part.keys or values is not part.values
        parts.append(_Part(rows, keys, values, _positions(part, start, keys)))
    if empty and any(part.positions is None for part in parts):
        raise UnsupportedInputError(
            "a padded batch was pruned by a press that does not say which tokens it kept, so that "
            f"its rows cannot be told from their padding; {_SAY_WHAT_IS_KEPT}"
        )
    pruned = _is_pruned(layer)
    # Also a layer left whole has to know its padding, once the mask is built for a pruned one.
    if changed or (not pruned and isinstance(mask_layer(cache), PrunedLayer)):
        padded = bool(empty) or (pruned and layer.padded)
        _store(cache, call.site, parts, layer.get_seq_length(), padded)


def _is_pruned(layer: Any) -> bool:
    """Whether `layer` was pruned, or its padding dropped, since it was last reset."""
    return isinstance(layer, PrunedLayer) and layer.n_pruned > 0


def _empty_slots(layer: Any, mask: Any, call: AttentionCall) -> list[int]:
    """Slots on the left of each row that hold padding, or nothing since an inner scope pruned."""
    if call.tokens is None:
        return padding(mask, call.length)
    if not layer.padded:
        return []
    empty: list[int] = (call.tokens[:, 0] < 0).sum(dim=-1).tolist()
    return empty


def _positions(part: AttentionCall, start: int, keys: Tensor) -> Tensor | None:
    """Positions in the sequence of the kept `keys`, `(B, H_kv, n)`; None if the press said none.

    Args:
        start: padding on the left that was cut off before the press saw the call.
    """
    kept = part.kept
    if kept is None:
        if keys.shape[2] != part.length:
            return None
        kept = torch.arange(part.length, device=keys.device).expand(keys.shape[:3])
    return kept + start if part.tokens is None else part.tokens.gather(-1, kept)


def _store(cache: Any, site: AttentionSite, parts: list[_Part], seen: int, padded: bool) -> None:
    layer = PrunedLayer()
    n = max(part.keys.shape[2] for part in parts)
    order = torch.tensor([row for part in parts for row in part.rows]).argsort()

    def joined(states: list[Tensor], empty: float) -> Tensor:
        if len(states) == 1:
            return states[0]
        return torch.cat([_pad_left(s, n, empty) for s in states])[order.to(states[0].device)]

    positions = [part.positions for part in parts if part.positions is not None]
    layer.hold(
        joined([part.keys for part in parts], 0),
        joined([part.values for part in parts], 0),
        joined(positions, -1) if len(positions) == len(parts) else None,
        seen,
        padded,
    )
    former = cache.layers[site.layer_idx]
    cache.layers[site.layer_idx] = layer
    layer.uneven = layer.n_slots != mask_layer(cache).keys.shape[2]
    # Of those that transformers has, these alone can do without a mask for a single token.
    layer.steps_masked = not site.attn_implementation.startswith(("sdpa", "flash"))
    if former.keys.device != layer.keys.device:
        layer.offload()


def _pad_left(states: Tensor, n: int, value: float) -> Tensor:
    """`states` `(B, H, m, ...)` with slots holding `value` on the left, `n` in all."""
    missing = n - states.shape[2]
    if not missing:
        return states
    shape = (*states.shape[:2], missing, *states.shape[3:])
    return torch.cat((states.new_full(shape, value), states), dim=2)
