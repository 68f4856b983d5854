"""Writing cache layers: stores what a press keeps of a layer. Nothing else replaces layers."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.cache.caches import known, mask_layer
from press_core.cache.in_place import ChannelPrunedLayer
from press_core.cache.memory import Key
from press_core.cache.positions import real_tokens
from press_core.cache.pruned import PrunedLayer
from press_core.cache.ragged import RaggedLayer
from press_core.cache.slots import update_needs
from press_core.cache.tokens import Kept
from press_core.errors import PressError, UnsupportedInputError
from press_core.eviction import Eviction
from press_core.rows import Decisions
from press_core.traits import Evicts


def store(cache: Any, decisions: Decisions, key: Key) -> PrunedLayer | None:
    """Replace the cache layer that decisions were made about by one with what they keep.

    Args:
        key: of the scope that prunes.

    Returns:
        The layer that has changed; None if none has.

    Raises:
        UnsupportedCacheError: if this kind of layer cannot store the result.
        UnsupportedInputError: if a press did not report kept positions where they are needed.
    """
    site = decisions.call.site
    index = site.layer_idx
    old, stored = known(cache, index), cache.layers[index]
    if decisions.any("late_mask"):
        if not isinstance(old, RaggedLayer):
            raise PressError(
                "Eviction.late evicts tokens that an Eviction.keep_per_head(call, mask, carried) "
                "of an earlier forward has kept; return that one first"
            )
        _evict_late(old, decisions)
        return old
    first = mask_layer(cache)
    # If the model builds its mask for a pruned layer, unpruned layers must know their padding, too.
    padded = not old.is_pruned and isinstance(first, PrunedLayer) and first.is_pruned
    if decisions.is_whole and not padded:
        _leave_whole(cache, index, old, decisions, key)
        return None
    carried = {name for eviction in decisions.evictions for name in eviction.carried}
    if lost := old.carried.keys() - carried:  # before a buffer is overwritten
        raise UnsupportedInputError(
            f"a press has stored {', '.join(sorted(lost))} with this cache for its next pruning, "
            "after which keys stand elsewhere than their positions say; let no other press prune it"
        )
    layer = (_ragged if decisions.any("head_mask") else _even)(old, decisions)
    _remember(layer, old, decisions, key)
    cache.layers[index] = layer
    update_needs(cache, [site])
    if stored.keys.device != layer.keys.device:
        layer.offload()
    return layer


def _leave_whole(cache: Any, index: int, old: PrunedLayer, decisions: Decisions, key: Key) -> None:
    """Store a layer that loses nothing, with the memory of the scope."""
    slots, layer = decisions.call.memory, old.settled()
    if slots or key in old.memories:
        layer.remember(key, old.memory(key).after_pruning(slots, by_this_scope=True))
    keeps = layer is cache.layers[index] or layer.memories
    cache.layers[index] = layer if keeps else layer.inner


def _kept(old: PrunedLayer, decisions: Decisions) -> Kept:
    """Which of the tokens that the layer has seen are kept."""
    rows, real = decisions.rows, real_tokens(old, decisions.occupied)
    positions = _int32(_positions(old, decisions))
    kept = Kept(positions, decisions.length, old.n_seen, rows, real, shift=old.kept.shift)
    known = decisions.call.at.rotary
    if decisions.any("rotary_positions"):
        rotary = _int32(decisions.joined(_rotated_to, -1))
        following = decisions.numbers(_following)
        # With `keeps_count` the model goes on counting tokens seen: layers that keep their
        # positions rely on it, and the mask of a padded batch has columns for all tokens.
        keeps_count = kept.is_padded or decisions.call.site.place.keeps_count
        shift = kept.shift if keeps_count else kept.n_seen - max(following)
        return replace(kept, rotary=rotary, following=following, shift=shift)
    if old.is_rerotated:
        kept = replace(kept, following=_following_now(old, decisions.occupied))
    is_known = old.is_rerotated or (kept.is_padded and decisions.call.when.decoding)
    return replace(kept, rotary=_int32(decisions.of_slots(known))) if is_known else kept


def _rotated_to(eviction: Eviction) -> Tensor:
    """Rotary position of each kept key: its own, if the press rerotated other rows only."""
    if eviction.rotary_positions is not None:
        return eviction.rotary_positions
    own, kept = eviction.call.key_positions(), eviction.known_kept
    return own.expand(*kept.shape[:2], -1).gather(-1, kept)


def _following(eviction: Eviction) -> int:
    """Position of the next token of rows, in a batch in which the press rerotated some."""
    if eviction.next_position is not None or not eviction.call.length:
        return eviction.next_position or 0
    rotary = eviction.rotary_positions
    return int((eviction.call.key_positions() if rotary is None else rotary).amax()) + 1


def _following_now(old: PrunedLayer, occupied: Tensor | None) -> tuple[int, ...]:
    """Position of each row's next token: padding between turns takes no position."""
    real = None if occupied is None else pad(occupied[:, old.kept.n_slots :], (0, 1), value=True)
    return tuple(old.following_positions(old.n_recent + 1, real)[:, -1].tolist())


def _int32(positions: Tensor | None) -> Tensor | None:
    return None if positions is None else positions.to(torch.int32)


def _positions(old: PrunedLayer, decisions: Decisions) -> Tensor | None:
    """Sequence position of each kept slot, `(B, H_kv, n)`, -1 if empty; None: unknown."""
    return decisions.of_slots(old.all_positions()) if old.is_pruned else decisions.slots()


def _even(old: PrunedLayer, decisions: Decisions) -> PrunedLayer:
    """The layer for decisions that keep the same number of tokens in every head."""
    kept = _kept(old, decisions)
    widths = {(e.channels is not None, e.keys.shape[-1]) for e in decisions.evictions}
    if len(widths) > 1:
        raise UnsupportedInputError(
            f"a press keeps {sorted(n for _, n in widths)} channels of the keys of different rows "
            "of a batch, which one layer cannot store; let it choose as many in every row, or run "
            "the rows one by one"
        )
    states = decisions.joined(lambda e: e.keys), decisions.joined(lambda e: e.values)
    if decisions.any("channels"):
        channels = decisions.joined(lambda e: e.channels)
        old.check_stores(Evicts.CHANNELS)
        inner = old.holding(*states).inner
        layer: PrunedLayer = ChannelPrunedLayer(inner, channels, decisions.call.keys.shape[-1])
    else:
        layer = old.holding(*states)
    layer.kept = kept
    layer.carried = _carried(decisions, missing=float("nan"))
    return layer


def _carried(decisions: Decisions, missing: float) -> dict[str, Tensor]:
    """The presses' `carried` tensors; `missing` pads rows with fewer tokens than others."""

    def of(eviction: Eviction, name: str) -> Tensor:
        nothing = eviction.keys.new_zeros(*eviction.keys.shape[:2], 0)
        before = eviction.call.carried.get(name, nothing)  # the row may have had no new tokens
        return eviction.carried.get(name, before)

    names = {name for eviction in decisions.evictions for name in eviction.carried}
    return {name: decisions.joined(partial(of, name=name), missing) for name in names}


def _remember(layer: PrunedLayer, old: PrunedLayer, decisions: Decisions, key: Key) -> None:
    """Store the memory of each open scope, for the kept slots, with `layer`."""
    own = {key: old.memory(key)} if decisions.call.memory else {}
    keeps_slots = decisions.is_whole and decisions.occupied is None
    for other, memory in (old.memories | own).items():
        is_own = other is key
        if is_own or not keeps_slots:  # else what is buffered of its tokens still fits
            slots = decisions.call.memory if is_own else memory.of_slots(decisions.call.length)
            found = {name: decisions.of_slots(x, empty=0) for name, x in slots.items()}
            carried_scores = {name: x for name, x in found.items() if x is not None}
            memory = memory.after_pruning(carried_scores, by_this_scope=is_own)
        layer.remember(other, memory)


# ---- heads of different lengths ------------------------------------------------------------------


def _ragged(old: PrunedLayer, decisions: Decisions) -> RaggedLayer:
    """The layer for decisions that keep different tokens in each head.

    Raises:
        UnsupportedInputError: if keys are rerotated.
    """
    if old.is_rerotated or decisions.any("rotary_positions"):
        raise UnsupportedInputError(
            "a press rerotates keys and keeps other tokens for each head, so that new tokens have "
            "no common position; leave one of the two out"
        )

    def chosen(eviction: Eviction) -> Tensor:
        if eviction.head_mask is not None:
            return eviction.head_mask
        return torch.ones_like(eviction.keys[..., 0], dtype=torch.bool)

    late = any(eviction.carried for eviction in decisions.evictions)
    kept = Kept(n_seen=old.n_seen, real=real_tokens(old, decisions.occupied))
    old.check_stores(Evicts.PER_HEAD, late)
    keys, values = decisions.joined(lambda e: e.keys), decisions.joined(lambda e: e.values)
    site, positions = decisions.call.site, _positions(old, decisions)
    assert positions is not None
    positions = positions.clamp(max=old.n_seen - 1)  # tokens that a press adds count as the last
    mask, group = decisions.joined(chosen), site.num_heads // site.num_kv_heads
    layer = RaggedLayer.of(keys, values, mask, positions, kept, old, group)
    layer.carry(_carried(decisions, missing=float("inf")))
    return layer


def _evict_late(layer: RaggedLayer, decisions: Decisions) -> None:
    """Evict tokens of earlier forwards, and the padding among this forward's tokens."""
    real, occupied = real_tokens(layer, decisions.occupied), decisions.occupied
    if occupied is not None:
        layer.evict(~occupied[:, None].expand(-1, layer.n_heads, -1), real)
    layer.carry(_carried(decisions, missing=float("inf")))
    late = decisions.joined(_late_of, False)
    if bool(late.any()):
        layer.evict(late, real)


def _late_of(eviction: Eviction) -> Tensor:
    """`(B, H_kv, m)` bool: which of the last `m` tokens of each head to evict."""
    recent = next(iter({**eviction.call.carried, **eviction.carried}.values()))
    stays, late = torch.zeros_like(recent, dtype=torch.bool), eviction.late_mask
    return stays if late is None else torch.cat((late, stays), dim=-1)
