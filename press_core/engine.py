"""Around an attention module: observe its call, let the press decide, store what it keeps."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, autocast

from press_core import errors, running
from press_core.cache import caches, masks, writing
from press_core.cache.positions import first_position, rotary_positions, tokens_held, tokens_seen
from press_core.cache.pruned import PrunedLayer
from press_core.cache.slots import occupied_slots, update_needs
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.forward import Forward
from press_core.model.sites import AttentionSite
from press_core.observed import Moment, Positions
from press_core.observing import AttentionPass, call_of, context_call, step_of, with_steps
from press_core.press import Press
from press_core.rows import Decisions, groups_of
from press_core.scope import ScopeState
from press_core.traits import Evicts, Needs, Phase


def after_attention(passed: AttentionPass) -> None:
    """Prune the layer that an attention module has filled, if the press acts in this phase."""
    phase = Phase.PREFILL if passed.forward.is_context else Phase.DECODING
    if passed.cache is not None and passed.press.phases & phase:
        _act(passed)


@running.eagerly
def _act(passed: AttentionPass) -> None:
    scope, cache, index = passed.scope, passed.cache, passed.site.layer_idx
    passed.forward.acting[scope].depths.add(passed.site.place.depth)
    with autocast(passed.hidden_states.device.type, enabled=False):
        call = observe(passed)
        if call is not None:
            decisions = judged(passed.press, call)
            if any(other.place.owner == index for other in scope.bystanders):
                passed.layer.stop_sharing()  # what reads this layer has yet to run
            store_decisions(scope, cache, decisions, passed.forward)
            if getattr(cache.layers[index], "is_first", False):
                passed.forward.at_end.append(partial(update_needs, cache, scope.sites))


@running.eagerly
def keep_whole(passed: AttentionPass) -> None:
    """Store a layer that a press's own hook has left out, if the first layer was pruned."""
    cache = passed.cache
    layer, first = caches.known(cache, passed.site.layer_idx), caches.mask_layer(cache)
    if not layer.is_pruned and isinstance(first, PrunedLayer) and first.is_pruned:
        call = call_of(passed, *layer.states(), when=Moment(occupied=passed.occupied))
        writing.store(cache, Decisions(call, Eviction.nothing), passed.scope.key)


def store_decisions(scope: ScopeState, cache: Any, decisions: Decisions, forward: Forward) -> None:
    """Store what is kept of a layer in a forward, and record it in the tally."""
    site = decisions.call.site
    layer = writing.store(cache, decisions, scope.key)
    if layer is None:
        return
    forward.at_failure.append(partial(setattr, layer, "is_unusable", True))
    if decisions.is_whole:  # padding was dropped, or an earlier layer pruned, and no token evicted
        return
    seen, kept = tokens_seen(layer, None), float(layer.lengths().double().mean())
    kept = site.ranks.mean(kept, decisions.call.keys.device)
    scope.tally.record(site.layer_idx, sum(seen) / len(seen), kept)


def judged(press: Press, call: AttentionCall) -> Decisions:
    """The press's decisions about `call`, one for each group of rows with the same padding."""

    def decided(part: AttentionCall) -> Eviction:
        # Padded turns: a row may have no token, or none whose queries the press could read.
        decides = part.length and (part.query is None or part.query.states.shape[2])
        return running.decided(press, part) if decides else Eviction.nothing(part)

    return Decisions(call, decided, press.row_by_row)


# ---- observing -----------------------------------------------------------------------------------


def observe(passed: AttentionPass) -> AttentionCall | None:
    """The call for a press to decide about; None if it does not decide yet."""
    is_context = passed.forward.is_context
    if not is_context and evicts_later(passed.press, passed.layer):
        return _new_tokens(passed)
    require_readable(passed.layer, passed.site)
    if not is_context:
        return _decoding_step(passed)
    call: AttentionCall | None = context_call(passed)
    for handle in running.OBSERVED:
        call = None if call is None else handle(passed, call)
    if call is None:
        return None
    occupied = passed.occupied
    when = replace(call.when, seen=tokens_seen(passed.layer, occupied), occupied=occupied)
    call = call.replace(when=when)
    if passed.scope.traits.remembers:
        call = call.replace(memory=remembered(passed.press, call))
    return call


def evicts_later(press: Press, layer: PrunedLayer) -> bool:
    """Whether heads of `layer` differ in length, and `press` goes on evicting from them."""
    return bool(layer.carried and layer.refusal) and press.evicts is Evicts.PER_HEAD


def require_readable(layer: PrunedLayer, site: AttentionSite) -> None:
    """Raise if no press can prune the layer again: its heads differ in length, or in channels."""
    if layer.refusal:
        raise errors.UnsupportedInputError(
            f"a press left {site.name} with {layer.refusal}, which no press can prune again: act "
            "in the prefill alone or, if another scope pruned it, open that scope outermost"
        )


def remembered(press: Press, call: AttentionCall) -> dict[str, Tensor]:
    """The updated per-token values of `Press.remember`, for each slot: `(B, H_kv, S)` by name."""
    found: dict[str, Tensor] = {}
    for rows, slots, part in groups_of(call):
        for name, of_rows in running.remembered(press, part).items():
            if name not in found:
                found[name] = of_rows.new_zeros(call.keys.shape[:3])
            values = found[name]
            values[rows] = of_rows if slots is None else values[rows].index_copy(2, slots, of_rows)
    return found


def _new_tokens(passed: AttentionPass) -> AttentionCall:
    """The call over the tokens of this forward only, for a layer whose heads differ in length."""
    n, layer = passed.hidden_states.shape[1], passed.layer
    occupied = masks.visible_tokens(passed.mask, n, layer.batch)
    when = Moment(decoding=True, seen=tokens_seen(layer, None), occupied=occupied)
    return call_of(passed, *layer.newest(n), carried=layer.carried_to(n), when=when)


def _decoding_step(passed: AttentionPass) -> AttentionCall | None:
    """The call over a layer while decoding; None if no pruning is due: states are buffered."""
    running.require_causal(passed)
    scope, press, layer = passed.scope, passed.press, passed.layer
    traits, progress = scope.traits, passed.forward.acting[scope]
    n_new = passed.hidden_states.shape[1]
    due = press.is_due(progress.n_steps, n_new)
    memory = layer.memory(scope.key)
    if due or traits.remembers:
        occupied = passed.occupied
        steps = progress.n_steps, progress.n_forwards
        seen = tokens_seen(layer, occupied) if due else None
        index = passed.site.layer_idx  # asked before the innermost scope prunes the layer
        held = passed.forward.once(lambda: tokens_held(layer, occupied, n_new), "held", index)
        when = Moment(True, None, *steps, seen, held=held, occupied=occupied)
        known = memory.of_slots(layer.n_slots)
        call = call_of(passed, *layer.states(), memory=known, carried=layer.carried, when=when)
    if traits.remembers:
        call = call.replace(memory=remembered(press, call))
        memory = replace(memory, slots=call.memory)
    if traits.buffered_tokens:
        memory = memory.with_step(step_of(passed), traits.buffered_tokens)
    if traits.remembers or traits.buffered_tokens:
        scope.remember(passed.cache, passed.site.layer_idx, layer, memory)
    if not due:
        return None
    if traits.buffered_tokens:
        # A small buffer hides no token of this forward: without a buffer, all of them are seen.
        call = with_steps(call, memory, max(traits.buffered_tokens, n_new))
    last = None if passed.position_ids is None else passed.position_ids[:, -1]
    rotary = rotary_positions(layer, passed.site, occupied, last)
    return call.replace(at=replace(call.at, rotary=rotary))


def prune_before(scope: ScopeState, forward: Forward, mask: Any, site: AttentionSite) -> None:
    """Prune a layer before a forward of the decoder, by its keys and values only.

    Args:
        mask: the decoder's mask for full attention, up to the last token.
    """
    layer = caches.known(forward.cache, site.layer_idx)
    require_readable(layer, site)
    press, n = scope.press, forward.n_tokens
    says = type(press).acts_on is not Press.acts_on  # else its formula decides
    if says and not press.acts_on(layer.n_slots):
        return
    keys, values = (x.to(layer.device) for x in layer.states())
    occupied = occupied_slots(mask, layer, n, n_held=0)
    ids, rotary = forward.given.get("position_ids"), None
    # Padding between turns takes no positions, and cannot be told from others once it is evicted.
    between = occupied is not None and bool((occupied[:, 1:] < occupied[:, :-1]).any())
    if scope.traits.needs & Needs.ROPE or between or layer.kept.rotary is not None:
        rotary = rotary_positions(layer, site, occupied, first_position(ids, mask, layer, n) - 1)
    unknown = keys.new_empty(len(keys), 0, 0)  # hidden states are of earlier forwards
    at = Positions(rotary=rotary)
    when = Moment(decoding=True, seen=tokens_seen(layer, occupied), occupied=occupied)
    call = AttentionCall(
        site, unknown, keys, values, at=at, when=when, carried=layer.carried, scope=scope
    )
    with autocast(keys.device.type, enabled=False):
        decisions = judged(press, call)
    store_decisions(scope, forward.cache, decisions, forward)
