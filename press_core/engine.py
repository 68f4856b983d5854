"""Around an attention forward: observe what it was given and made, let the press decide, store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from press_core.cache.caches import (
    check_prunable,
    let_slide,
    prunable_layer,
    refuse_offloading,
)
from press_core.cache.masks import later_tokens, visible_tokens
from press_core.cache.pruned import (
    NOTHING_KNOWN,
    ChannelPrunedLayer,
    PrefillStagingLayer,
    PrunedLayer,
    ScopeMemory,
    is_quantized,
    pruned_layer,
    states_of,
    storage_of,
)
from press_core.cache.ragged import RaggedLayer
from press_core.cache.reading import (
    first_position,
    occupied_slots,
    prepared,
    prepared_reader,
    with_columns_of_clock,
)
from press_core.cache.storing import (
    BatchEviction,
    RowGroup,
    evict_late,
    n_seen,
    positions_in,
    row_groups,
    store,
    tokens_seen,
)
from press_core.call import AttentionCall
from press_core.copies import copied
from press_core.distributed import of_all_heads, of_own_heads
from press_core.drafts import after_context, rest_of, with_context
from press_core.errors import UnsupportedCacheError, UnsupportedInputError
from press_core.eviction import SAY_WHAT_IS_KEPT, Eviction
from press_core.model import probe
from press_core.model.forward import AttentionForward, DecoderForward
from press_core.model.generation import WHOLE, Part, part_of
from press_core.model.sites import AttentionSite, LeftAlone
from press_core.press import Evicts, Phase, Press
from press_core.scope import ScopeState


def before_attention(scope: ScopeState, forward: AttentionForward) -> AttentionForward | None:
    """What to do before an attention forward.

    Where drafts came behind a context, in one forward, the module has run the context before this
    returns (and scopes have pruned it), and is to run the drafts alone.

    Returns:
        The forward with the arguments that it is to get; None: it is none of the scope's.

    Raises:
        UnsupportedCacheError: if the cache is of a kind that cannot be pruned.
        UnsupportedInputError: if drafts come to a press that acts while decoding.
    """
    if probe.is_running():
        return forward
    if forward.cache is None:
        _refuse_paged(scope, forward)
        return forward
    if not scope.takes(forward.cache, forward.site.depth):
        _left_in_the_middle(scope)
        return None
    scope.seen.add(forward.site.depth)
    press, cache, index = scope.press, forward.cache, forward.site.layer_idx
    check_prunable(cache, index)
    if press.evicts.needs_attention:
        refuse_offloading(press, cache)
    layer = forward.layer
    empty = layer is None or layer.get_seq_length() == 0
    part = part_of(forward.site) if empty or forward.n_tokens > 1 else WHOLE
    if part.n_drafts or part.beside_drafts:  # another scope may have parted them from the context
        _refuse_drafts_in_decoding(scope)
    if empty and 0 < part.n_drafts < forward.n_tokens:
        forward, empty = after_context(forward, part.n_drafts), False
        # Only when it has ended: a hook that is taken off meanwhile cannot join what was run apart.
        scope.reached[cache] = forward.site.depth - 1
    if empty:
        if Phase.PREFILL in scope.phases and is_quantized(layer):
            _refuse_chunks_of_quantized(part)
            cache.layers[index] = PrefillStagingLayer(storage_of(layer))
        return copied(forward, part=part)
    if Phase.BEFORE_DECODING in scope.phases:
        press.before_attention(scope, forward)
    return prepared(forward, scope)


def run_drafts(scope: ScopeState, forward: AttentionForward) -> Any:
    """Run the module on drafts behind a context that it has run; returns its output of both."""
    output = rest_of(forward)
    scope.reached[forward.cache] = forward.site.depth
    return output


def acts_before_decoder(scope: ScopeState) -> bool:
    """Whether there is something to do before forwards of the whole decoder."""
    return Phase.DECODER in scope.phases or scope.press.rerotates


def before_decoder(scope: ScopeState, forward: DecoderForward) -> DecoderForward:
    """What to do before a forward of the whole decoder.

    Returns:
        The forward with the arguments that it is to get.

    Raises:
        UnsupportedInputError: if its mask hides tokens that are rotated to other positions.
    """
    now = scope.as_it_is()
    if now is None or probe.is_running():
        return forward
    scope.running.decoder = True
    forward = scope.press.before_decoder(now, forward)
    return with_columns_of_clock(forward) if scope.press.rerotates else forward


def before_left_alone(other: LeftAlone, forward: AttentionForward) -> AttentionForward:
    """What to do before the forward of an attention module that presses leave alone.

    Returns:
        The forward with the arguments that it is to get.
    """
    cache = forward.cache
    if not isinstance(cache, Cache) or probe.is_running():
        return forward
    if other.window is not None:
        let_slide(cache, forward.site.layer_idx, other.window)
    if other.owner is not None:
        return prepared_reader(forward, cache.layers[other.owner])
    return forward


def after_attention(
    scope: ScopeState,
    forward: AttentionForward,
    output: Any,
    query: Callable[[], Tensor] | None,
    query_is_rotated: bool,
) -> Any:
    """Prune the layer that an attention forward has filled, if it is the press's time to act.

    Args:
        forward: as `before_attention` returned it.
        output: what the attention module has returned.
        query: gives `(B, H, q, d)` if the press is to see this forward; None: it asks for none.
        query_is_rotated: whether that is the query after RoPE.

    Returns:
        What the module is to return.
    """
    if forward.cache is None or probe.is_running() or _left_in_the_middle(scope):
        return with_context(forward.context_output, output)
    layer = prunable_layer(forward.cache, forward.site.layer_idx)
    begun = _is_in_prefill(scope, layer)
    if begun or n_seen(layer) == forward.n_tokens:
        scope.n_prefills += 1
        states = _grouped(forward, query)
        call = _part_of_prefill(scope, forward, begun, output, states, query_is_rotated)
        if call is not None and Phase.PREFILL in scope.phases:
            _prune(scope, forward, _with_memory(scope, forward, call))
        if call is not None and call.n_to_come:
            _remember_prefill(scope, forward)
    elif Phase.DECODING in scope.phases:
        call = _decoding_step(scope, forward, _grouped(forward, query), query_is_rotated)
        if call is not None:
            _prune(scope, forward, call)
    elif not isinstance(layer, (PrunedLayer, RaggedLayer)):
        scope.longest_whole = max(scope.longest_whole, n_seen(layer))
    if forward.context_output is not None:
        scope.reached[forward.cache] = forward.site.depth
    return with_context(forward.context_output, output)


def _grouped(forward: AttentionForward, query: Callable[[], Tensor] | None) -> Tensor | None:
    return None if query is None else forward.site.grouped(query())


def after_decoder(scope: ScopeState, forward: DecoderForward, output: Any) -> None:
    """What a press does after it, if the forward began in the scope and that is still open."""
    now, begun = scope.as_it_is(), vars(scope.running).pop("decoder", False)
    if now is not None and begun:
        scope.press.after_decoder(now, forward, output)


def prune_before(scope: ScopeState, forward: AttentionForward) -> None:
    """Prune a layer before the forward, by what it holds alone."""
    layer = forward.layer
    _require_known(forward)
    call = _call(
        scope,
        forward,
        *states_of(layer),
        hidden_states=forward.hidden_states[:, :0],
        position_embeddings=None,
        position_ids=None,
        rotary_positions=_rotary_positions(forward, first_position(forward) - 1, n_new=0),
        decoding=True,
    )
    _prune(scope, forward, call, n_new=0)


def prune_heads(
    scope: ScopeState, cache: Any, site: AttentionSite, kept: Tensor, occupied: Tensor
) -> None:
    """Let the heads of a layer keep tokens of their own, once the whole decoder has run.

    Args:
        cache: holds the layer.
        kept: `(B, H_kv, S)` bool, of the heads of all ranks.
        occupied: `(B, S)` bool, which slots hold tokens.
    """
    forward = AttentionForward((), {site.cache_name: cache}, site)
    keys, values = states_of(forward.layer)
    seen = tokens_seen(forward.layer, occupied, len(keys))
    nothing = keys.new_zeros(len(keys), 0, 0)  # nobody asks for the hidden states again
    call = AttentionCall(site, nothing, keys, values, seen=seen, scope=scope)
    eviction = Eviction.keep_per_head(call, site.heads.own(kept, keys.shape[1]))
    rows = RowGroup(list(range(len(keys))), None, eviction)
    store(forward, scope, BatchEviction(call, [rows]))


def row_lengths(forward: AttentionForward) -> Tensor:
    """How many tokens each row of the layer holds before the forward, `(B,)` int64."""
    layer, batch = forward.layer, forward.hidden_states.shape[0]
    device = forward.hidden_states.device
    occupied = occupied_slots(forward, n_new=0)
    if occupied is not None:
        return occupied.sum(dim=-1).to(device)
    n_slots = layer.n_slots if isinstance(layer, PrunedLayer) else layer.get_seq_length()
    return torch.full((batch,), n_slots, device=device)


def _prune(
    scope: ScopeState, forward: AttentionForward, call: AttentionCall, n_new: int | None = None
) -> None:
    """Let the press decide, for rows of different padding apart, and store what is left."""
    press, layer, now = scope.press, forward.layer, scope.as_it_is()
    if now is None:
        return
    if isinstance(layer, RaggedLayer):
        call = call.but(scope=now)
        real = visible_tokens(forward.argument("attention_mask"), forward.n_tokens, layer.batch)
        real = None if real is None else real.to(call.keys.device)
        evict_late(forward, scope, layer, BatchEviction(call, _judged(press, call, real)))
        return
    occupied = occupied_slots(forward, forward.n_tokens if n_new is None else n_new)
    call = call.but(scope=now, seen=tokens_seen(layer, occupied, call.keys.shape[0]))
    store(forward, scope, BatchEviction(call, _judged(press, call, occupied)))
    scope.reached[forward.cache] = forward.site.depth
    _left_in_the_middle(scope)


def _left_in_the_middle(scope: ScopeState) -> bool:
    """Whether another thread has closed the scope, maybe in the middle of a forward of this one."""
    if not scope.is_open:
        scope.mark_torn()  # who closes it may be about to, and this forward goes on
    return not scope.is_open


def _parts(
    call: AttentionCall, occupied: Tensor | None, row_by_row: bool
) -> Iterable[tuple[list[int], Tensor | None, AttentionCall]]:
    """The calls of rows of different padding, with their rows and slots; see `row_groups`."""
    if occupied is not None:
        occupied = occupied.to(call.keys.device)
    groups = row_groups(call.keys.shape[0], occupied, row_by_row)
    if occupied is None and len(groups) == 1:
        return [(groups[0][0], None, call)]
    return ((rows, slots, call.of_rows(rows, slots)) for rows, slots in groups)


def _judged(press: Press, call: AttentionCall, occupied: Tensor | None) -> list[RowGroup]:
    """What the press decides about rows whose slots are `occupied` `(B, S)` alike; None: all."""
    groups = []
    for rows, slots, part in _parts(call, occupied, press.row_by_row):
        nobody = slots is not None and not len(slots)  # a row that did not ask in this turn
        eviction = Eviction.nothing(part) if nobody else _decided(press, part)
        groups.append(RowGroup(rows, slots, eviction))
    return groups


def _decided(press: Press, call: AttentionCall) -> Eviction:
    """What the press decides, about the heads of all ranks, for those of this one.

    Raises:
        UnsupportedInputError: if it reads hidden states that were not kept for it.
    """
    try:
        return of_own_heads(press.evict(of_all_heads(call)), call)
    except (RuntimeError, TypeError) as error:
        if not (call.hidden_states.is_meta and "meta" in str(error)):
            raise
        raise UnsupportedInputError(
            f"{type(press).__name__} asks for hidden states of {call.site.name} that were not "
            "kept; the formula that reads them is to declare `needs = Needs.HIDDEN_STATES`"
        ) from error


def _with_memory(
    scope: ScopeState, forward: AttentionForward, call: AttentionCall
) -> AttentionCall:
    """The call of a forward that has just ended, with what the press remembers up to date."""
    if not scope.remembers:
        return call
    occupied = occupied_slots(forward, forward.n_tokens)
    known: dict[str, Tensor] = {}
    for rows, slots, part in _parts(call, occupied, row_by_row=False):
        for name, of_all in scope.press.remember(of_all_heads(part)).items():
            of_part = call.site.heads.own(of_all, call.keys.shape[1])
            of_rows = of_part
            if slots is not None:
                empty = of_part.new_zeros(*of_part.shape[:2], call.length)
                of_rows = empty.index_copy_(2, slots, of_part)
            if name not in known:
                known[name] = of_part.new_zeros(call.keys.shape[:3])
            known[name][rows] = of_rows
    return call.but(memory=known)


# ---- observing -----------------------------------------------------------------------------------


def _call(
    scope: ScopeState, forward: AttentionForward, keys: Tensor, values: Tensor, **fields: Any
) -> AttentionCall:
    device = forward.hidden_states.device  # an offloaded cache is brought back to the model
    known = {
        "hidden_states": forward.hidden_states,
        "position_embeddings": forward.cos_sin,
        "position_ids": forward.position_ids,
        "kwargs": forward.kwargs,
        "scope": scope,
    }
    return AttentionCall(
        site=forward.site, keys=keys.to(device), values=values.to(device), **{**known, **fields}
    )


def _prefill(
    scope: ScopeState,
    forward: AttentionForward,
    output: Any,
    query: Tensor | None,
    query_is_rotated: bool,
) -> AttentionCall:
    """The prefill that has just ended, seen from its arguments, its output and the layer it filled.

    Raises:
        UnsupportedInputError: if an inner scope pruned the layer and did not say what it kept, so
            that nobody knows which queries and positions its keys belong to.
    """
    _require_known(forward)
    layer = forward.layer
    weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    pruned = isinstance(layer, PrunedLayer) and layer.is_pruned
    rotary_positions = layer.all_rotary_positions() if pruned else None
    return _call(
        scope,
        forward,
        *states_of(layer),
        attentions=forward.site.grouped(weights)
        if not pruned and isinstance(weights, Tensor)
        else None,
        query=query,
        query_is_rotated=query_is_rotated,
        later=_later(scope, forward),
        tokens=layer.all_positions().long().to(forward.hidden_states.device) if pruned else None,
        rotary_positions=None if rotary_positions is None else rotary_positions.long(),
    )


def _part_of_prefill(
    scope: ScopeState,
    forward: AttentionForward,
    begun: bool,
    output: Any,
    query: Tensor | None,
    query_is_rotated: bool,
) -> AttentionCall | None:
    """The prefill that has just ended; None while more of it is to come.

    A press that prunes after every chunk gets each of them. For others the states of the chunks
    wait, so that they see the context as if it had come at once.
    """
    n_to_come = (forward.part or part_of(forward.site)).n_to_come
    if not begun and not n_to_come:
        if Phase.PREFILL not in scope.phases:
            return None
        return _prefill(scope, forward, output, query, query_is_rotated)
    _require_readable(forward)
    _require_causal(scope, forward)
    press, states = scope.press, states_of(forward.layer)
    here = _call(scope, forward, *states, query=query, query_is_rotated=query_is_rotated)
    if press.prunes_chunks:
        return _chunk(forward, here, n_to_come)
    buffer = _remember_prefill(scope, forward)
    states_here = {}
    if Phase.PREFILL in scope.phases:
        states_here = _states_to_buffer(scope, forward, query, query_is_rotated)
    buffer = buffer.after_step(forward.n_tokens, None, **states_here)
    forward.layer.memories[scope.key] = buffer
    if n_to_come:
        return None
    del forward.layer.memories[scope.key]
    if Phase.PREFILL not in scope.phases:
        return None
    known = {name: states.joined() for name, states in buffer.states.items()}
    return _prefill(scope, forward, None, None, True).but(**_known_states(known))


def _chunk(forward: AttentionForward, here: AttentionCall, n_to_come: int) -> AttentionCall:
    """A chunk of a prefill and what is kept of those before it."""
    layer, ids = forward.layer, here.position_ids
    if ids is None:
        seen = n_seen(layer)
        ids = torch.arange(seen - forward.n_tokens, seen, device=here.keys.device)[None]
    rotary = _rotary_positions(forward, ids[:, -1], forward.n_tokens)
    return here.but(position_ids=ids, rotary_positions=rotary, n_to_come=n_to_come)


def _is_in_prefill(scope: ScopeState, layer: Any) -> bool:
    memory = layer.memories.get(scope.key) if isinstance(layer, PrunedLayer) else None
    return memory is not None and memory.is_prefill


def _remember_prefill(scope: ScopeState, forward: AttentionForward) -> ScopeMemory:
    """Let the layer of `forward` know that its prefill is under way, and what came of it so far."""
    if not isinstance(forward.layer, PrunedLayer):
        forward.cache.layers[forward.site.layer_idx] = pruned_layer(forward.layer)
    memory = forward.layer.memories.get(scope.key, NOTHING_KNOWN)
    forward.layer.memories[scope.key] = replace(memory, is_prefill=True)
    return forward.layer.memories[scope.key]


def _known_states(states: dict[str, Tensor]) -> dict[str, Any]:
    """As fields of a call, what a buffer knows of the last tokens."""
    return {
        "hidden_states": states["hidden_states"],
        "position_embeddings": states["cos_sin"].chunk(2, -1) if "cos_sin" in states else None,
        "position_ids": states["position_ids"].squeeze(-1) if "position_ids" in states else None,
        "query": states.get("query"),
        "query_is_rotated": True,
    }


def _decoding_step(
    scope: ScopeState, forward: AttentionForward, query: Tensor | None, query_is_rotated: bool
) -> AttentionCall | None:
    """What is known of the last tokens while decoding, or None if the press is not due.

    Queries are buffered as they are after RoPE, so that both mechanisms buffer the same.
    """
    layer, press = forward.layer, scope.press
    if isinstance(layer, RaggedLayer) and press.evicts is Evicts.PER_HEAD:
        return _new_tokens(scope, forward, layer, query, query_is_rotated)
    _require_readable(forward)
    _require_causal(scope, forward)
    if not isinstance(layer, PrunedLayer):
        layer = forward.cache.layers[forward.site.layer_idx] = pruned_layer(layer)
    memory = layer.memories.get(scope.key, NOTHING_KNOWN)
    if scope.remembers:
        here = _call(
            scope,
            forward,
            *states_of(layer),
            query=query,
            query_is_rotated=query_is_rotated,
            memory=memory.of_slots(layer.n_slots),
            decoding=True,
        )
        memory = replace(memory, slots=_with_memory(scope, forward, here).memory)
    limit, ids = scope.buffered_tokens, forward.position_ids
    states = _states_to_buffer(scope, forward, query, query_is_rotated) if limit else {}
    memory = memory.after_step(forward.n_tokens, limit, **states)
    layer.memories[scope.key] = memory
    if not press.is_due(memory.n_steps, forward.n_tokens):
        return None
    _require_known(forward)
    asked: dict[str, Any] = {"query": query, "query_is_rotated": query_is_rotated}
    if limit:
        asked = _known_states(memory.last(limit))
    return _call(
        scope,
        forward,
        *states_of(layer),
        **asked,
        rotary_positions=_rotary_positions(
            forward, None if ids is None else ids[:, -1], forward.n_tokens
        ),
        memory=memory.of_slots(layer.n_slots),
        n_steps=memory.n_steps,
        n_forwards=memory.n_forwards,
        decoding=True,
    )


def _states_to_buffer(
    scope: ScopeState, forward: AttentionForward, query: Tensor | None, query_is_rotated: bool
) -> dict[str, Tensor]:
    """By name, what a press may ask about the tokens of a step later: `(B, ..., q, channels)`.

    Of hidden states that it has not said it reads, which would take more than the cache, the shape
    alone.
    """
    batch, cos_sin, ids = forward.hidden_states.shape[0], forward.cos_sin, forward.position_ids
    hidden_states, rotary = forward.hidden_states, forward.site.rotary
    states = {
        "hidden_states": hidden_states if scope.reads_hidden_states else hidden_states.to("meta")
    }
    if query is not None:
        if not query_is_rotated and rotary is not None and cos_sin is not None:
            query = rotary.rotate(query, *cos_sin)
        states["query"] = query
    if cos_sin is not None:
        states["cos_sin"] = torch.cat(cos_sin, dim=-1).expand(batch, -1, -1)
    if ids is not None:
        states["position_ids"] = ids.expand(batch, -1).unsqueeze(-1)
    return states


def _new_tokens(
    scope: ScopeState,
    forward: AttentionForward,
    layer: RaggedLayer,
    query: Tensor | None,
    query_is_rotated: bool,
) -> AttentionCall:
    """The tokens of this forward alone, of a layer whose heads differ in length."""
    n_new = forward.n_tokens
    return _call(
        scope,
        forward,
        *layer.newest(n_new),
        query=query,
        query_is_rotated=query_is_rotated,
        recent_scores=layer.recall(n_new),
        decoding=True,
    )


def _rotary_positions(forward: AttentionForward, last: Tensor | None, n_new: int) -> Tensor | None:
    """To which position each key of the layer is rotated, `(1 or B, 1 or H_kv, S)` int64.

    Args:
        last: position of the last token that the layer has seen, `(1 or B,)`.
        n_new: how many of the forward's tokens the layer holds already.

    Returns:
        None where a press did not say what it kept, or the model counts images in its own way.
    """
    layer, device = forward.layer, forward.hidden_states.device
    empty = _empty_recent(forward, n_new)  # padding between turns stands behind what came before
    rerotated = layer.all_rotary_positions() if isinstance(layer, PrunedLayer) else None
    if rerotated is not None:
        rerotated = rerotated.to(device)
        return rerotated if empty is None else rerotated - empty.cumsum(dim=-1).unsqueeze(1)
    if forward.site.rotary is not None and forward.site.rotary.in_3d:
        return None
    positions = positions_in(layer)
    if positions is None or last is None:
        return None if positions is None else positions.to(device)
    lag = (n_seen(layer) - 1 - last)[:, None]
    if empty is not None:
        behind = empty.flip(-1).cumsum(dim=-1).flip(-1) - empty
        counted = lag < empty.sum(dim=-1, keepdim=True)  # positions go on over padding
        lag = lag - behind.masked_fill(counted, 0)
    positions = positions.to(device) - lag.unsqueeze(1)
    known = layer.kept.rotary_positions if isinstance(layer, PrunedLayer) else None
    if known is None:
        return positions
    recent = positions[..., known.shape[-1] :].expand(*known.shape[:2], -1)
    return torch.cat((known.to(positions), recent), dim=-1)


def _empty_recent(forward: AttentionForward, n_new: int) -> Tensor | None:
    """`(B, S)` int64: 1 for slots of padding that came after the layer was pruned last."""
    layer, occupied = forward.layer, occupied_slots(forward, n_new)
    if occupied is None:
        return None
    empty = (~occupied.to(forward.hidden_states.device)).long()
    empty[:, : layer.kept.n_slots if isinstance(layer, PrunedLayer) else 0] = 0
    return empty


def _later(scope: ScopeState, forward: AttentionForward) -> Tensor | None:
    """Which later ones the tokens of the forward see, `(B, q, q)` bool, if the press may ask."""
    if not scope.reads_queries:
        return None
    return later_tokens(forward.argument("attention_mask"), forward.n_tokens)


def _require_causal(scope: ScopeState, forward: AttentionForward) -> None:
    """Refuse tokens that see later ones where the press will judge them together with others."""
    if _later(scope, forward) is not None:
        raise UnsupportedInputError(
            f"{type(scope.press).__name__} reads attention weights, and in {forward.site.name} "
            "tokens of an image see later ones; let it come with the context, in one forward"
        )


def _require_readable(forward: AttentionForward) -> None:
    if isinstance(forward.layer, (RaggedLayer, ChannelPrunedLayer)):
        raise UnsupportedInputError(
            f"the press of an inner scope has left {forward.site.name} with heads of different "
            "lengths or channels, which no press can prune again; open that scope outermost"
        )


def _require_known(forward: AttentionForward) -> None:
    """Refuse a layer that nobody can judge: in a prefill also if it is not known what is left."""
    _require_readable(forward)
    layer = forward.layer
    told = not (isinstance(layer, PrunedLayer) and layer.is_pruned) or layer.positions is not None
    if not told and n_seen(layer) == forward.n_tokens:
        raise UnsupportedInputError(
            f"the press of an inner scope pruned {forward.site.name} without saying which tokens "
            f"it kept; open that scope outermost, or {SAY_WHAT_IS_KEPT}"
        )


def _refuse_drafts_in_decoding(scope: ScopeState) -> None:
    if scope.phases & (Phase.DECODING | Phase.BEFORE_DECODING):
        raise UnsupportedInputError(
            f"{type(scope.press).__name__} evicts tokens while decoding, and those of assisted "
            "generation (assistant_model, prompt_lookup_num_tokens) are drafts that may be taken "
            "back; leave the assistance out, or use a press that acts after the prefill only"
        )


def _refuse_chunks_of_quantized(part: Part) -> None:
    if part.n_to_come:
        raise UnsupportedCacheError(
            "a quantized cache gives back no exact keys of earlier chunks, which a press would "
            "judge; prefill it at once, or use a DynamicCache"
        )


def _refuse_paged(scope: ScopeState, forward: AttentionForward) -> None:
    """Refuse continuous batching, which passes its own cache by its own name."""
    if forward.kwargs.get("cache") is None:
        return
    why = (
        " cannot prune the paged cache of continuous batching (generate_batch): requests share its "
        "blocks; use generate with a DynamicCache"
    )
    scope.warnings.append(lambda: why)  # the thread that runs the requests keeps its errors
    raise UnsupportedCacheError(type(scope.press).__name__ + why)
