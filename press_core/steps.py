"""What every mechanism does around an attention forward: fit the arguments before, prune after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import QuantizedLayer

from press_core.cache.ragged import RaggedLayer
from press_core.caches import check_prunable, prunable_layer, refuse_offloading
from press_core.call import AttentionCall
from press_core.errors import UnsupportedInputError
from press_core.forward import Forward
from press_core.layers import ChannelLayer, ExactLayer, Journal, Pruned, adopted, states_of
from press_core.masks import mask_for_pruned, padding
from press_core.pruning import SAY_WHAT_IS_KEPT, Compress, is_pruned, positions_in, prune

# ---- before --------------------------------------------------------------------------------------


def before(forward: Forward) -> None:
    """Fit cache and arguments to each other.

    Raises:
        UnsupportedCacheError: if the cache is of a kind that cannot be pruned.
    """
    if forward.cache is None:
        return
    forward.run.seen.add(forward.site.depth)
    press, cache, index = forward.press, forward.cache, forward.site.layer_idx
    check_prunable(cache, index)
    if press.needs_attention:
        refuse_offloading(press, cache)
    layer = forward.layer
    if layer is None or layer.get_seq_length() == 0:
        if press.acts_in_prefill and isinstance(layer, QuantizedLayer):
            cache.layers[index] = ExactLayer(layer)
        return
    press.before(forward)
    if isinstance(forward.layer, Pruned):
        forward.layer.serve()
        _fit_mask(forward, forward.layer)
        _fit_positions(forward, forward.layer)


def _fit_mask(forward: Forward, layer: Pruned) -> None:
    """Give the forward a mask that fits a layer pruned before.

    The model builds one mask for all layers, from the uncompressed columns; it fits neither rows of
    different lengths nor layers of different lengths.
    """
    hidden_states, mask = forward.hidden_states, forward.argument("attention_mask")
    n_keys = layer.n_slots + hidden_states.shape[1]
    if not layer.padded and (mask is None or mask.shape[-1] == n_keys):
        return
    occupied, n_recent = layer.occupied(), n_keys - layer.n_pruned
    form = forward.site.attn_implementation
    mask = mask_for_pruned(mask, occupied, n_recent, hidden_states, form)
    forward.replace("attention_mask", mask)


def _fit_positions(forward: Forward, layer: Pruned) -> None:
    """Let positions continue from where the keys were turned to, whatever the model counts."""
    if layer.rotary_positions is None:
        return
    hidden_states = forward.hidden_states
    lag = 0 if layer.rotary_padding is None else layer.rotary_padding[:, None]
    start = layer.get_seq_length() - lag
    steps = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    positions = (start + steps).view(-1, len(steps))
    given = forward.argument("position_ids")
    if given is not None and torch.equal(given.expand_as(positions), positions):
        return
    rotary = forward.site.rotary
    assert rotary is not None
    forward.replace("position_embeddings", rotary.embeddings(hidden_states, positions))
    if given is not None:
        forward.replace("position_ids", positions)


def prune_before(forward: Forward, compress: Compress) -> None:
    """Prune a layer before the forward, by what it holds alone."""
    layer, device = forward.layer, forward.hidden_states.device
    _require_known(forward, layer)
    call = _call(
        forward,
        *states_of(layer),
        hidden_states=forward.hidden_states[:, :0],
        position_embeddings=None,
        position_ids=None,
        rotary_positions=_rotary_positions(layer, forward.first_position - 1, device),
        decoding=True,
    )
    prune(forward, call, compress)


def row_lengths(forward: Forward) -> Tensor:
    """How many tokens each row of the layer holds, `(B,)` int64."""
    layer, batch = forward.layer, forward.hidden_states.shape[0]
    n_slots = layer.n_slots if isinstance(layer, Pruned) else layer.get_seq_length()
    held = torch.full((batch,), n_slots, device=forward.hidden_states.device)
    mask = forward.argument("attention_mask")
    if is_pruned(layer):
        return held - (~layer.occupied()).sum(dim=-1).to(held.device) if layer.padded else held
    empty = padding(mask, n_slots, prefill=False)
    return held - torch.tensor(empty, device=held.device) if empty else held


# ---- after ---------------------------------------------------------------------------------------


def after(
    forward: Forward, output: Any, query: Tensor | None, query_is_rotated: bool, compress: Compress
) -> None:
    """Prune the layer that the forward has filled, if this is the press's time to act.

    Args:
        output: what the attention module has returned.
        query: `(B, H, q, d)`, if the press asked for it.
        query_is_rotated: whether that is the query after RoPE.
        compress: what the press does with a call.
    """
    if forward.cache is None:
        return
    layer, press = prunable_layer(forward.cache, forward.site.layer_idx), forward.press
    seen = layer.get_seq_length() + getattr(layer, "forgotten", 0)
    if seen == forward.hidden_states.shape[1]:
        if press.acts_in_prefill:
            call = _observed_prefill(forward, layer, output, query, query_is_rotated)
            prune(forward, call, compress)
    elif press.acts_in_decoding:
        step = _observed_step(forward, query, query_is_rotated)
        if step is not None:
            prune(forward, step, compress)


def _call(forward: Forward, keys: Tensor, values: Tensor, **fields: Any) -> AttentionCall:
    device = forward.hidden_states.device  # an offloaded cache is brought back to the model
    fields = {"position_embeddings": forward.argument("position_embeddings"), **fields}
    fields = {"position_ids": forward.argument("position_ids"), **fields}
    fields = {"hidden_states": forward.hidden_states, **fields}
    return AttentionCall(
        site=forward.site, keys=keys.to(device), values=values.to(device), **fields
    )


def _observed_prefill(
    forward: Forward, layer: Any, output: Any, query: Tensor | None, query_is_rotated: bool
) -> AttentionCall:
    """The prefill that has just ended, seen from its arguments, its output and the layer it filled.

    Raises:
        UnsupportedInputError: if an inner scope pruned the layer and did not say what it kept, so
            that nobody knows which queries and positions its keys belong to.
    """
    _require_known(forward, layer)
    weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    pruned = is_pruned(layer)
    tokens = layer.positions.long() if pruned else None
    turned_to = layer.rotary_positions if pruned else None
    return _call(
        forward,
        *states_of(layer),
        attentions=weights if tokens is None and isinstance(weights, Tensor) else None,
        query=query,
        query_is_rotated=query_is_rotated,
        tokens=None if tokens is None else tokens.to(forward.hidden_states.device),
        rotary_positions=None if turned_to is None else turned_to.long(),
    )


def _observed_step(
    forward: Forward, query: Tensor | None, query_is_rotated: bool
) -> AttentionCall | None:
    """What is known of the last tokens while decoding, or None if the press is not due.

    Queries are remembered as they are after RoPE, so that both mechanisms remember the same.
    """
    cache, index, press = forward.cache, forward.site.layer_idx, forward.press
    if isinstance(forward.layer, RaggedLayer) and press.evicts == "heads":
        return _new_tokens(forward, forward.layer, query, query_is_rotated)
    if not isinstance(forward.layer, Pruned):
        _require_known(forward, forward.layer)
        cache.layers[index] = adopted(forward.layer)
    layer = forward.layer
    journal = layer.journals.setdefault(forward.run.key, Journal())
    batch, device = forward.hidden_states.shape[0], forward.hidden_states.device
    here = _call(forward, layer.keys, layer.values, query=query, query_is_rotated=query_is_rotated)
    cos_sin, ids = here.position_embeddings, here.position_ids
    journal.note(
        press.n_remembered or here.hidden_states.shape[1],
        hidden_states=here.hidden_states,
        query=None if query is None else here.queries(),
        cos=None if cos_sin is None else cos_sin[0].expand(batch, -1, -1),
        sin=None if cos_sin is None else cos_sin[1].expand(batch, -1, -1),
        position_ids=None if ids is None else ids.expand(batch, -1).unsqueeze(-1),
    )
    if not press.is_due(journal.n_steps, layer.n_slots):
        return None
    _require_known(forward, layer)
    known = journal.states
    return _call(
        forward,
        *states_of(layer),
        hidden_states=known.get("hidden_states", forward.hidden_states[:, :0]),
        query=known.get("query"),
        query_is_rotated=True,
        position_embeddings=(known["cos"], known["sin"]) if "cos" in known else None,
        position_ids=known["position_ids"].squeeze(-1) if "position_ids" in known else None,
        rotary_positions=_rotary_positions(layer, None if ids is None else ids[:, -1], device),
        decoding=True,
    )


def _rotary_positions(layer: Any, last: Tensor | None, device: torch.device) -> Tensor:
    """To which position each key of `layer` is rotated, `(1 or B, 1 or H_kv, S)` int64.

    Args:
        last: position of the last token that the layer has seen, `(1 or B,)`.
    """
    if isinstance(layer, Pruned):
        turned_to = layer.all_rotary_positions()
        if turned_to is not None:
            return turned_to.to(device)
    positions = positions_in(layer)
    assert positions is not None
    if last is None:
        return positions.to(device)
    n_padding = layer.get_seq_length() + getattr(layer, "forgotten", 0) - 1 - last
    return positions.to(device) - n_padding.view(-1, 1, 1)


def _new_tokens(
    forward: Forward, layer: RaggedLayer, query: Tensor | None, query_is_rotated: bool
) -> AttentionCall:
    """The tokens of this forward alone, of a layer whose heads differ in length."""
    n_new = forward.hidden_states.shape[1]
    states = layer.newest(n_new)
    call = _call(forward, *states, query=query, query_is_rotated=query_is_rotated, decoding=True)
    call.remembered = layer.recall(n_new)
    return call


def _require_known(forward: Forward, layer: Any) -> None:
    name = forward.site.name
    if isinstance(layer, (RaggedLayer, ChannelLayer)):
        raise UnsupportedInputError(
            f"the press of an inner scope has left {name} with heads of different lengths or "
            "channels, which no press can prune again; open that scope outermost"
        )
    if is_pruned(layer) and layer.positions is None:
        raise UnsupportedInputError(
            f"the press of an inner scope pruned {name} without saying which tokens it kept; "
            f"open that scope outermost, or {SAY_WHAT_IS_KEPT}"
        )
