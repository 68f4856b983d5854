"""Before and after a forward of the decoder: classify it and decide which scopes take part.

```
joined_forward(scope, given)   every forward: most decode steps return here
begin(scope, forward, given)   if the scope takes part: prefill or decoding, what layers need
  engine.after_attention         after each attention module, if the scope acts in this forward
leave(scope, output)           after the outermost scope: what presses do after the decoder
```
"""

import threading
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from press_core import errors, running
from press_core.cache import caches, masks, reading, slots
from press_core.cache.memory import FIRST
from press_core.cache.one_mask import SEES_ALL, one_mask
from press_core.cache.pruned import PrunedLayer
from press_core.engine import evicts_later, prune_before, require_readable
from press_core.forward import (
    Arguments,
    Forward,
    Progress,
    cache_after,
    current,
    lasting_frame,
)
from press_core.model.sites import AttentionSite
from press_core.running import chunks
from press_core.scope import ScopeState
from press_core.traits import Phase

GIVEN = "given"
"""In `Forward.notes`, with the index of a layer: by name, what its module was given."""

MASK, MADE = "attention_mask", "made"
"""The decoder's mask; in `Forward.notes`, the one made for a scope and the caller's instead."""


def enter(scope: ScopeState, given: Arguments) -> Arguments:
    """Called before a forward of the decoder; returns the arguments to call it with."""
    forward = joined_forward(scope, given)
    return given if forward is None else begin(scope, forward, given)


def joined_forward(scope: ScopeState, given: Arguments) -> Forward | None:
    """The forward that begins, if the scope takes part in it; a step without work is only counted.

    It runs in every forward, so its common case is cheap: in most decode steps no press acts, and
    the cache needs no special masks or positions.
    """
    is_compiling = torch.compiler.is_compiling()
    outer, thread, left_out = current.forward, scope.traits.thread, current.left_out
    if outer is not None and scope in outer.entered and not outer.runs:
        outer.fail()  # an interrupt has ended it
    is_left_out = left_out and (thread is None or left_out == "all")
    elsewhere = thread is not None and (is_compiling or thread != threading.get_ident())
    if is_left_out or elsewhere or not scope.is_open_in(outer):  # another thread may have closed it
        return None
    if outer is not None or not scope.traits.may_pass:
        return _joined(scope, given)
    return _unless_it_passes(scope, given, is_compiling)


def _unless_it_passes(scope: ScopeState, given: Arguments, is_compiling: bool) -> Forward | None:
    """The forward, unless it is a decode step that needs nothing from the scope.

    The scope may close during such a step: it does not wait for it.
    """
    cache, forward = given.cache, None
    if not isinstance(cache, Cache) or (not is_compiling and chunks.is_under_way(cache)):
        return _joined(scope, given)
    layers = caches.pruned_layers(cache)
    if not layers and caches.is_empty(cache, scope.first):
        return _joined(scope, given)
    if given.get("attention_mask") is not None or caches.are_special(layers):
        forward = _joined(scope, given)
        changes_mask = reading.with_counted_columns(forward, layers) is not given
        if changes_mask or reading.needs_help(forward, layers):
            return forward
    if scope.traits.counts_steps and not _waits(scope, cache, given):
        return forward or _joined(scope, given)
    if not is_compiling:  # compiled forwards are not counted, and contain what is installed
        _note_whole(scope, cache, layers)
        scope.tally.n_forwards += 1
        scope.on_layers.take_off(scope)
    return None


def begin(scope: ScopeState, forward: Forward, given: Arguments) -> Arguments:
    """Let a scope take part in a forward: classify it, and find out what its layers need.

    Args:
        given: the arguments that the decoder was called with, maybe by an outer scope.

    Returns:
        The arguments to call the decoder with.

    Raises:
        UnsupportedCacheError: if the cache is of a kind that cannot be pruned.
        UnsupportedInputError: if the layout of the input is not supported.
    """
    is_compiling = torch.compiler.is_dynamo_compiling()  # torch.export runs hooks as they are
    if not is_compiling:  # compiled forwards are not counted
        if not forward.entered and running.is_early_exit():
            return given
        forward.frame = forward.frame or lasting_frame()
        scope.running[forward] = threading.get_ident()
        if not scope.is_open_in(forward.outer):  # closed by a thread that did not wait for it
            scope.running.pop(forward, None)
            return given
        scope.tally.n_forwards += 1
    if not forward.entered:
        forward.is_context = caches.is_empty(forward.cache, scope.first)
        if forward.is_context:
            caches.put_back_reset(forward.cache)
            running.let_slide(scope, forward.cache)
    forward.entered.append(scope)
    current.forward = forward
    made, own = forward.notes.get(MADE, (None, None))
    is_made = made is not None and given.get(MASK) is made
    forward.given = given.replace(**{MASK: own}) if is_made else given
    if scope.traits.phases & Phase.BEFORE_DECODER:
        forward.given = scope.press.before_decoder(scope, forward)
    for handle in () if is_compiling else running.ENTERED:
        handle(scope, forward)
    if forward.is_context:
        _begin_context(scope, forward)
    else:
        _continue(scope, forward)
    layers, own = caches.pruned_layers(forward.cache), forward.given.get(MASK)
    forward.given = reading.with_counted_columns(forward, layers)
    given = _prepare_reading(scope, forward, layers)
    forward.notes[MADE] = given.get(MASK), own
    _note_whole(scope, forward.cache, layers)
    _settle_layers(scope, forward)
    return given


def _prepare_reading(scope: ScopeState, forward: Forward, layers: list[PrunedLayer]) -> Arguments:
    """The decoder's arguments to read the pruned `layers` with; help for each layer if need be."""
    forward.helped = ()
    if not reading.needs_help(forward, layers):
        return forward.given
    slots.note_masked(forward)
    forward.reading, given = one_mask(forward, scope.sites[0], layers)
    if forward.reading is None:
        forward.helped = forward.cache.layers
    return given


def _settle_layers(scope: ScopeState, forward: Forward) -> None:
    """Put hooks or patches on the layers if the forward needs them, else take them off."""
    if _is_idle(scope, forward):
        if forward.reading is None:
            leave(scope, None)
        if not torch.compiler.is_compiling():  # compiled graphs contain what is installed
            scope.on_layers.take_off(scope, forward)
    elif not scope.on_layers.are_on:
        scope.on_layers.put_on()


def _waits(scope: ScopeState, cache: Cache, given: Arguments) -> bool:
    """Whether a press that counts decode steps does nothing in this one; it is then counted."""
    if given.n_tokens != 1:
        return False
    first, memory = scope.counted(cache)
    if scope.acts_in_step(memory.ticks - FIRST, 1):
        return False
    scope.remember(cache, scope.first, first, memory)
    return True


def _joined(scope: ScopeState, given: Arguments) -> Forward:
    """The forward that an outer scope has just entered, or a new one, maybe inside of another."""
    forward = current.forward
    if forward is None or forward.decoder is not scope.decoder or scope in forward.entered:
        return Forward(scope.decoder, given, outer=forward)
    return forward


def _is_idle(scope: ScopeState, forward: Forward) -> bool:
    busy = forward.acting or forward.helped or forward.outer is not None or forward.at_end
    after = forward.is_context and scope.traits.phases & Phase.AFTER_DECODER
    waits = after or forward.n_remaining > 0  # a failure of a chunk has to be noticed
    return not busy and not waits and len(forward.entered) == 1


def _begin_context(scope: ScopeState, forward: Forward) -> None:
    cache, press = forward.cache, scope.press
    scope.tally.n_contexts += 1
    scope.check_fields()
    press.check_site(scope.sites[0])
    if press.evicts.needs_attention and getattr(cache, "offloading", False):
        raise errors.UnsupportedCacheError(
            f"{type(press).__name__} leaves a cache that attention reads in place, which an "
            "offloaded cache does not support; use a DynamicCache without offloading"
        )
    if cache is not None and scope.traits.phases:
        for site in scope.sites:
            caches.check_prunable(cache, site.layer_idx)
    if scope.traits.phases & Phase.IN_PREFILL:
        mask = masks.for_full_attention(forward.given.get(MASK))
        at_once = caches.is_empty(cache, scope.first) and not forward.n_remaining
        if cache is not None and at_once and isinstance(mask, Tensor) and mask.dim() == 2:
            # Raises on masks that are not supported, before any layer is filled.
            masks.prefill_tokens(mask, forward.n_tokens, len(mask))
        forward.acting[scope] = Progress()


def _continue(scope: ScopeState, forward: Forward) -> None:
    """Count a forward over a filled cache, and decide whether the press acts in it."""
    traits, cache = scope.traits, forward.cache
    if traits.phases & Phase.BEHIND_CONTEXTS:
        masks.refuse_bias(masks.for_full_attention(forward.given.get(MASK)))
    if traits.phases & (Phase.BEFORE_DECODER | Phase.BEFORE_DECODING):
        forward.notes.pop(reading.HIDDEN_CONTEXT, None)  # the press may have changed the mask
    if traits.phases & Phase.BEFORE_DECODING:
        scope.check_fields()
        _prune_before(scope, forward)
    if not traits.counts_steps:
        return
    first, memory = scope.counted(cache)
    scope.remember(cache, scope.first, first, memory)
    n_steps, n_forwards = memory.ticks - FIRST, memory.all_ticks - FIRST
    if scope.acts_in_step(n_steps, forward.n_tokens):
        if scope.press.is_due(n_steps, forward.n_tokens):
            scope.check_fields()
        for site in _filled(scope, cache):  # before any layer gets tokens that others will not
            layer = caches.known(cache, site.layer_idx)
            if not evicts_later(scope.press, layer):
                require_readable(layer, site)
        forward.acting[scope] = Progress(n_steps, n_forwards)


def _filled(scope: ScopeState, cache: Any) -> list[AttentionSite]:
    """The sites whose layers have seen tokens: a model may have run its first layers only."""
    stored = cache.layers
    sites = [site for site in scope.sites if site.layer_idx < len(stored)]
    return [site for site in sites if stored[site.layer_idx].is_initialized]


def _prune_before(scope: ScopeState, forward: Forward) -> None:
    is_of_slots = reading.is_built_for_slots(forward)  # asked before the slots change
    first = caches.known(forward.cache, scope.first)
    n_filled, mask = first.n_old + first.n_recent, reading.filled_mask(forward, first)
    for site in _filled(scope, forward.cache):
        prune_before(scope, forward, mask, site)
    slots.update_needs(forward.cache, scope.sites)
    if is_of_slots and caches.known(forward.cache, scope.first) is not first:
        forward.given = reading.with_newest_columns(forward, n_filled)


def _note_whole(scope: ScopeState, cache: Any, pruned: list[PrunedLayer]) -> None:
    """Record the length of a cache that was filled before the scope saw any context."""
    tally = scope.tally
    if pruned or tally.n_contexts or not scope.traits.phases & Phase.ON_CONTEXTS:
        return
    if isinstance(cache, Cache) and not torch.compiler.is_compiling():
        tally.longest_whole = max(tally.longest_whole, int(cache.get_seq_length(scope.first)))


def leave(scope: ScopeState, output: Any, failed: bool = False) -> None:
    """Called after a forward of the decoder that returned `output`, or failed."""
    forward = current.forward
    if forward is None or scope is not (forward.entered or [None])[0]:
        return  # the scope does not take part, or an outer one has not left yet
    if failed and forward.frame is not None and forward.frame is not lasting_frame():
        return  # what failed is a forward inside of it, which scopes had not entered yet
    current.forward = forward.outer
    if failed:
        forward.fail()
        return
    try:
        for entered in reversed(forward.entered):
            _note_missed(entered, forward, output)
            completed = forward.is_context and not forward.n_remaining
            if completed and entered.traits.phases & Phase.AFTER_DECODER:
                entered.press.after_decoder(entered, forward, output)
    except BaseException:  # some layers were pruned, and others may not be
        forward.fail()
        raise
    forward.end()


def _note_missed(scope: ScopeState, forward: Forward, output: Any) -> None:
    """Record the sites that filled their layers in a forward without the scope noticing.

    Raises:
        ScopeError: if it has pruned others; if all layers are whole, a warning when it closes is
            enough.
    """
    progress, sites = forward.acting.get(scope), scope.sites
    if progress is None or len(progress.depths) == len(sites):
        return
    cache = cache_after(forward, output)
    filled = {site.place.depth for site in sites if not caches.is_empty(cache, site.layer_idx)}
    missed = filled - progress.depths  # a model may have run its first layers only
    scope.tally.missed |= missed
    if missed and progress.depths:
        why = "".join(filter(None, (warning() for warning in scope.warnings)))
        name = type(scope.press).__name__
        raise errors.ScopeError(f"{name} prunes some layers and not others{why}")


# ---- attention modules that read a cache ---------------------------------------------------------


def before_attention(
    forward: Forward, site: AttentionSite, given: Arguments, attends: bool = False
) -> Arguments:
    """The arguments to call an attention module with, in a forward that reads pruned layers.

    A module that reads another one's layer reads the states that the other one has read, which may
    have been pruned since.

    Args:
        attends: whether an attention function of this library reads the layer.
    """
    if not forward.helped:
        return given
    if site.place.owner is None:
        layer = forward.helped[site.layer_idx]
        if attends and forward.notes.get(SEES_ALL) and given.get(MASK) is None:
            forward.reading = layer
            return given
        given = reading.helped(forward, site, given, layer, attends)
        if forward.entered[0].bystanders:  # which read layers of other modules
            forward.notes[GIVEN, site.layer_idx] = {name: given.get(name) for name in _READ}
        return given
    owner: dict[str, Any] = forward.notes.get((GIVEN, site.place.owner), {})
    n, taken = given.get("hidden_states").shape[1], owner.keys() & {*given.names, *given.kwargs}
    return given.replace(**{name: _last(owner[name], n, *_READ[name]) for name in taken})


_READ = {"attention_mask": (4, -2), "position_embeddings": (3, -2), "position_ids": (2, -1)}
"""What depends on the layer that is read: its least number of dimensions, which one is tokens."""


def _last(given: Any, n: int, least: int, dim: int) -> Any:
    """The part for the last `n` tokens: Gemma 4 runs others only up to layers that cache them."""
    if isinstance(given, tuple):
        return tuple(_last(part, n, least, dim) for part in given)
    if not isinstance(given, Tensor) or given.dim() < least or given.shape[dim] <= n:
        return given
    return given.narrow(dim, given.shape[dim] - n, n)
