"""The one writer of cache layers: what a press has left of a layer is put in its place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from press_core.cache.caches import known, mask_layer
from press_core.cache.channels import ChannelPrunedLayer
from press_core.cache.memory import Key, Memory
from press_core.cache.pruned import PrunedLayer
from press_core.cache.ragged import RaggedLayer
from press_core.cache.reading import reading_needs
from press_core.cache.tokens import Kept
from press_core.errors import UnsupportedInputError
from press_core.eviction import Eviction
from press_core.model.sites import AttentionSite
from press_core.rows import Decisions


def store(cache: Any, site: AttentionSite, decisions: Decisions, key: Key) -> PrunedLayer | None:
    """Let the layer of `site` hold what is left of it.

    Args:
        key: of the scope that prunes.

    Returns:
        The layer that does; None if nothing was evicted.

    Raises:
        UnsupportedCacheError: if it cannot hold that.
        UnsupportedInputError: if a press did not say what it kept where that matters.
    """
    index = site.layer_idx
    former, stored = known(cache, index), cache.layers[index]
    if decisions.any("late_mask"):
        assert isinstance(former, RaggedLayer)
        _evict_late(former, decisions)
        return former
    first = mask_layer(cache)
    # Also a layer left whole has to know its padding, once the mask is made for a pruned one.
    padded = not former.is_pruned and isinstance(first, PrunedLayer) and first.is_pruned
    if decisions.any("head_mask"):
        layer: PrunedLayer = _ragged(former, decisions)
    elif decisions.is_whole and not padded:
        _leave_whole(cache, index, former, decisions, key)
        return None
    else:
        layer = _even(former, site, decisions)
    layer.memories = _memories(former, decisions, key)
    cache.layers[index] = layer
    layer.is_first = mask_layer(cache) is layer
    layer.needs |= reading_needs(cache, layer, site)
    if stored.keys.device != layer.keys.device:
        layer.offload()
    return layer


def _leave_whole(
    cache: Any, index: int, former: PrunedLayer, decisions: Decisions, key: Key
) -> None:
    """Let a layer be what it is without a press, and hold what that remembers."""
    memory, slots, layer = former.memories.get(key), decisions.call.memory, former.settled()
    if slots or memory is not None:
        layer.remember(key, (memory or Memory()).after_pruning(slots, by_this_scope=True))
    keeps = isinstance(cache.layers[index], PrunedLayer) or layer.memories
    cache.layers[index] = layer if keeps else layer.inner


def _kept(former: PrunedLayer, site: AttentionSite, decisions: Decisions) -> Kept:
    """What is left of the tokens that the layer has seen."""
    rows, real = decisions.rows, real_tokens(former, decisions)
    if rows is None and former.kept.is_padded:
        rows = decisions.numbers(lambda eviction: eviction.length)
    if rows is not None:
        decisions.check_slots()
    positions = _int32(_positions(former, decisions))
    kept = Kept(positions, decisions.length, former.n_seen, rows, real, shift=former.kept.shift)
    known = decisions.call.at.rotary
    if decisions.any("rotary_positions"):
        rotary = _int32(decisions.joined(_rotated_to, -1))
        following = decisions.numbers(lambda e: e.next_position or e.length)
        # The count of tokens seen is what the model counts by: layers that keep their positions go
        # by it too, and so does its mask of a padded batch, which has columns for all tokens.
        keeps_count = kept.is_padded or site.place.keeps_count
        shift = kept.shift if keeps_count else kept.n_seen - max(following)
        return replace(kept, rotary=rotary, following=following, shift=shift)
    if former.is_rerotated:  # padding between turns has not moved later tokens on
        following = tuple((_required(known).flatten(1).amax(dim=1) + 1).tolist())
        kept = replace(kept, following=following)
    is_known = former.is_rerotated or (kept.is_padded and decisions.call.when.decoding)
    return replace(kept, rotary=_int32(decisions.of_slots(known))) if is_known else kept


def _rotated_to(eviction: Eviction) -> Tensor:
    rotary = eviction.rotary_positions
    return eviction.known_kept if rotary is None else rotary


def _int32(positions: Tensor | None) -> Tensor | None:
    return None if positions is None else positions.to(torch.int32)


def _positions(former: PrunedLayer, decisions: Decisions) -> Tensor | None:
    """Position in the sequence of what is left, `(B, H_kv, n)`, -1: nothing; None: nobody knows."""
    return decisions.of_slots(former.all_positions()) if former.is_pruned else decisions.slots()


def real_tokens(former: PrunedLayer, decisions: Decisions) -> Tensor | None:
    """Which of the tokens seen were no padding, `(B, n_seen)` bool; None: all."""
    occupied = decisions.occupied()
    if occupied is None and former.kept.real is None:
        return None
    keys, n_seen = decisions.call.keys, former.n_seen
    real = torch.ones(len(keys), n_seen, dtype=torch.bool, device=keys.device)
    if former.kept.real is not None:
        real[:, : former.kept.n_seen] = former.kept.real
    if occupied is not None:  # of the tokens that came since the last pruning
        end = min(former.n_slots, decisions.call.length)  # which may be about the latest alone
        n_new = min(former.n_recent, end)
        real[:, n_seen - n_new :] = occupied[:, end - n_new : end]
    return None if bool(real.all()) else real


def _even(former: PrunedLayer, site: AttentionSite, decisions: Decisions) -> PrunedLayer:
    """The layer whose heads hold as many tokens each."""
    kept = _kept(former, site, decisions)
    states = decisions.joined(lambda e: e.keys), decisions.joined(lambda e: e.values)
    if decisions.any("channels"):
        channels = decisions.joined(lambda e: _required(e.channels))
        former.check_shape("some channels of the keys")
        inner = former.holding(*states).inner
        layer: PrunedLayer = ChannelPrunedLayer(inner, channels, decisions.call.keys.shape[-1])
    else:
        layer = former.holding(*states)
    layer.kept = kept
    layer.carried = _carried(decisions, missing=float("nan"))
    return layer


def _carried(decisions: Decisions, missing: float) -> dict[str, Tensor]:
    """What presses carry on; `missing` where a row has fewer tokens than others."""

    def of(eviction: Eviction, name: str) -> Tensor:
        nothing = eviction.keys.new_zeros(*eviction.keys.shape[:2], 0)
        before = eviction.call.carried.get(name, nothing)  # a row may have got no token to judge
        return eviction.carried.get(name, before)

    names = {name for eviction in decisions.evictions for name in eviction.carried}
    return {name: decisions.joined(partial(of, name=name), missing) for name in names}


def _required(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _memories(former: PrunedLayer, decisions: Decisions, key: Key) -> dict[Key, Memory]:
    """What each open scope knows of what is left."""
    before = {k: memory for k, memory in former.memories.items() if k.is_open or k is key}
    if decisions.call.memory:
        before.setdefault(key, Memory())
    memories = {}
    for other, memory in before.items():
        mine = other is key
        slots = decisions.call.memory if mine else memory.of_slots(decisions.call.length)
        found = {name: decisions.of_slots(x, empty=0) for name, x in slots.items()}
        carried_scores = {name: x for name, x in found.items() if x is not None}
        memories[other] = memory.after_pruning(carried_scores, by_this_scope=mine)
    return memories


# ---- heads of different lengths ------------------------------------------------------------------


def _ragged(former: PrunedLayer, decisions: Decisions) -> RaggedLayer:
    """The layer whose heads differ in length."""
    if former.is_rerotated or decisions.any("rotary_positions"):
        raise UnsupportedInputError(
            "a press rerotates keys and keeps other tokens for each head, which no layer can tell "
            "later positions for; leave one of the two out"
        )

    def chosen(eviction: Eviction) -> Tensor:
        if eviction.head_mask is not None:
            return eviction.head_mask
        return torch.ones_like(eviction.keys[..., 0], dtype=torch.bool)

    late = ", and evicts some later" if any(e.carried for e in decisions.evictions) else ""
    kept = Kept(n_seen=former.n_seen, real=real_tokens(former, decisions))
    former.check_shape(f"other tokens for each head{late}")
    keys, values = decisions.joined(lambda e: e.keys), decisions.joined(lambda e: e.values)
    site, positions = decisions.call.site, _required(_positions(former, decisions))
    layer = RaggedLayer.of(
        keys,
        values,
        decisions.joined(chosen),
        positions.clamp(max=former.n_seen - 1),  # what joins counts as the last token
        kept,
        former,
        site.num_heads // site.num_kv_heads,
    )
    layer.carry(_carried(decisions, missing=float("inf")))
    return layer


def _evict_late(layer: RaggedLayer, decisions: Decisions) -> None:
    """Evict tokens some time after they came, and the padding of the forward's tokens at once."""
    real, occupied = real_tokens(layer, decisions), decisions.occupied()
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
