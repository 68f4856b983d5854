"""Storing what a press has left: rows that were judged apart are put together in one layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from press_core.cache.caches import mask_layer
from press_core.cache.pruned import (
    NOTHING_KNOWN,
    ChannelPrunedLayer,
    KeptTokens,
    PrefillStagingLayer,
    PrunedLayer,
    Rerotation,
    ScopeMemory,
    filled,
    pruned_layer,
    storage_of,
)
from press_core.cache.ragged import RaggedLayer
from press_core.cache.reading import reading_needs
from press_core.call import AttentionCall
from press_core.errors import UnsupportedCacheError, UnsupportedInputError
from press_core.eviction import SAY_WHAT_IS_KEPT, Eviction
from press_core.model.forward import AttentionForward
from press_core.model.sites import AttentionSite
from press_core.scope import ScopeState

# ---- rows that are judged together ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows of a batch whose slots hold tokens in the same places, and what is left of them.

    Attributes:
        rows: of the batch.
        slots: `(m,)` int64, those that hold tokens; None: all.
        eviction: what the press decided about them.
    """

    rows: list[int]
    slots: Tensor | None
    eviction: Eviction


def row_groups(
    batch: int, occupied: Tensor | None, row_by_row: bool
) -> list[tuple[list[int], Tensor | None]]:
    """The rows of a batch that are judged together, and their slots that hold tokens.

    Args:
        occupied: `(B, S)` bool; None: all slots of all rows.
        row_by_row: whether each row is judged by itself.
    """
    if occupied is None and (not row_by_row or batch == 1):
        return [(list(range(batch)), None)]
    if occupied is None:
        return [([row], None) for row in range(batch)]
    patterns: dict[Any, list[int]] = {}
    for row, pattern in enumerate(occupied.cpu().tolist()):
        patterns.setdefault(row if row_by_row else tuple(pattern), []).append(row)
    return [(rows, occupied[rows[0]].nonzero().squeeze(1)) for rows in patterns.values()]


KEYS, VALUES = attrgetter("keys"), attrgetter("values")
"""What is stored of an eviction."""


class BatchEviction:
    """What is left of a batch: the groups put together, the shorter with empty slots on the left.

    Attributes:
        call: about the whole batch.
        groups: each with its eviction.
        evictions: those.
        length: slots that the longest group keeps.
        is_whole: whether everything is left as it was.
        says_kept: whether it is known which tokens are left.
    """

    def __init__(self, call: AttentionCall, groups: list[RowGroup]) -> None:
        self.call, self.groups = call, groups
        self.evictions = [group.eviction for group in groups]
        self.length = max([eviction.length for eviction in self.evictions])
        self.is_whole = all([eviction.is_whole for eviction in self.evictions])
        self.says_kept = all([eviction.kept is not None for eviction in self.evictions])

    @cached_property
    def _order(self) -> Tensor:
        """Which of the groups' rows, one group after the other, each row of the batch is."""
        rows = [row for group in self.groups for row in group.rows]
        return torch.tensor(rows, device=self.call.keys.device).argsort()

    @property
    def is_uneven(self) -> bool:
        """Whether rows have lost padding, or keep different numbers of tokens."""
        lengths = [eviction.length for eviction in self.evictions]
        slots = [group.slots for group in self.groups if group.slots is not None]
        return bool(slots) or min(lengths) != self.length

    @property
    def mean_kept(self) -> float:
        """Slots that a row keeps, on average."""
        kept = [group.eviction.length * len(group.rows) for group in self.groups]
        return sum(kept) / self.call.keys.shape[0]

    @property
    def mean_seen(self) -> float:
        """Tokens that the layer has seen of a row, padding left out, on average."""
        assert self.call.seen is not None
        return sum(self.call.seen) / len(self.call.seen)

    def padding(self, n_seen: int) -> Tensor | None:
        """How much of the `n_seen` tokens of each row was padding, `(B,)` int64; None: nothing."""
        return None if self.mean_seen == n_seen else n_seen - torch.tensor(self.call.seen)

    def joined(self, of_group: Callable[[Eviction], Tensor], empty: float) -> Tensor:
        """What `of_group` says of the slots `(b, H_kv, n, ...)` of each, for the batch."""
        if len(self.evictions) == 1:
            return of_group(self.evictions[0])
        return self.per_row(lambda eviction: _pad_left(of_group(eviction), self.length, empty))

    def per_row(self, of_group: Callable[[Eviction], Tensor]) -> Tensor:
        """What `of_group` says of the rows `(b, ...)` of each, for the batch."""
        return self._together([of_group(eviction) for eviction in self.evictions])

    def _together(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)[self._order] if len(parts) > 1 else parts[0]

    def kept_positions(self, former: Any) -> Tensor | None:
        """Position in the sequence of what is left, of the slots of `former`; -1: empty slots."""
        if _is_pruned(former):
            return self.of_slots(former.all_positions())
        if not self.says_kept:
            return None

        def of_group(group: RowGroup) -> Tensor:  # slots and positions are the same
            kept = group.eviction.known_kept
            kept = kept if group.slots is None else group.slots[kept]
            return _pad_left(kept, self.length, -1)

        return self._together([of_group(group) for group in self.groups])

    def of_slots(self, known: Tensor | None, empty: float = -1) -> Tensor | None:
        """Of something known of every slot, `(1 or B, 1 or H_kv, S)`, what is left."""
        if known is None or not self.says_kept:
            return None
        known = known.to(self.call.keys.device).expand(self.call.keys.shape[:3])

        def of_group(group: RowGroup) -> Tensor:
            of_rows = known[group.rows] if len(self.groups) > 1 else known
            if group.slots is not None:
                of_rows = of_rows.index_select(2, group.slots)
            return _pad_left(of_rows.gather(-1, group.eviction.known_kept), self.length, empty)

        return self._together([of_group(group) for group in self.groups])


def _pad_left(states: Tensor, n: int, value: float) -> Tensor:
    """`states` `(B, H, m, ...)` with slots holding `value` on the left, `n` in all."""
    missing = n - states.shape[2]
    if not missing:
        return states
    shape = (*states.shape[:2], missing, *states.shape[3:])
    return torch.cat((states.new_full(shape, value), states), dim=2)


# ---- layers --------------------------------------------------------------------------------------


def n_seen(layer: Any) -> int:
    """Tokens that a cache layer has seen, padding included."""
    return int(layer.n_seen if isinstance(layer, PrunedLayer) else layer.get_seq_length())


def positions_in(layer: Any) -> Tensor | None:
    """Position in the sequence of what each slot holds, `(1 or B, 1 or H_kv, S)`, or None."""
    if isinstance(layer, PrunedLayer):
        return layer.all_positions()
    return torch.arange(layer.get_seq_length(), device=layer.device).view(1, 1, -1)


def store(forward: AttentionForward, scope: ScopeState, batch: BatchEviction) -> None:
    """Let the layer of `forward` hold what is left of it.

    Raises:
        UnsupportedCacheError: if it cannot hold that.
        UnsupportedInputError: if a press did not say what it kept where that matters.
    """
    former = forward.layer
    if any([eviction.head_mask is not None for eviction in batch.evictions]):
        _store(forward, scope, batch, former, *_ragged(scope, batch, former))
    # Also a layer left whole has to know its padding, once the mask is built for a pruned one.
    elif not batch.is_whole or (not _is_pruned(former) and _is_pruned(mask_layer(forward.cache))):
        _store(forward, scope, batch, former, *_pruned(forward, scope, batch, former))
    else:
        _leave_whole(forward, scope, batch.call.memory, former)


def _leave_whole(
    forward: AttentionForward, scope: ScopeState, slots: Mapping[str, Tensor], former: Any
) -> None:
    """Let the layer of `forward` be what it is without a press, and hold what that remembers."""
    layer = former
    if isinstance(former, PrefillStagingLayer):
        layer = former.quantized
        layer.update(former.keys, former.values)
    if slots and not isinstance(layer, PrunedLayer):
        layer = PrunedLayer(layer)
    if isinstance(layer, PrunedLayer):
        memory = layer.memories.get(scope.key, NOTHING_KNOWN)
        layer.memories[scope.key] = memory.after_pruning(slots, by_this_scope=True)
    forward.cache.layers[forward.site.layer_idx] = layer


def _store(
    forward: AttentionForward,
    scope: ScopeState,
    batch: BatchEviction,
    former: Any,
    layer: Any,
    mean_kept: float,
) -> None:
    """Put `layer` in the place of `former`, and say what was evicted."""
    forward.cache.layers[forward.site.layer_idx] = layer
    if isinstance(layer, PrunedLayer):
        layer.needs = reading_needs(forward.cache, layer, forward.site)
    scope.record(forward.site.layer_idx, batch.mean_seen, mean_kept)
    if former.keys.device != layer.keys.device:
        layer.offload()


def _is_pruned(layer: Any) -> bool:
    return isinstance(layer, PrunedLayer) and layer.is_pruned


def tokens_seen(layer: Any, occupied: Tensor | None, batch: int) -> tuple[int, ...]:
    """How many tokens `layer` has seen of each row, padding left out.

    Args:
        occupied: `(B, S)` bool, which slots hold tokens; None: all.
    """
    seen, pruned = n_seen(layer), _is_pruned(layer)
    padding = layer.kept.padding if pruned else None
    if padding is None and occupied is None:
        return (seen,) * batch
    empty = torch.zeros(batch, dtype=torch.int64) if padding is None else padding.cpu()
    if occupied is not None:
        since = occupied[:, layer.kept.n_slots if pruned else 0 :]
        empty = empty + (~since).sum(dim=-1).cpu()
    return tuple((seen - empty).tolist())


def _pruned(
    forward: AttentionForward, scope: ScopeState, batch: BatchEviction, former: Any
) -> tuple[PrunedLayer, float]:
    """The layer that holds what is left, and how many tokens each KV head keeps on average."""
    positions, seen = batch.kept_positions(former), n_seen(former)
    padded = batch.is_uneven or (_is_pruned(former) and former.kept.padded)
    if padded and positions is None:
        raise UnsupportedInputError(
            "a padded batch was pruned by a press that does not say which tokens it kept, so that "
            f"its rows cannot be told from their padding; {SAY_WHAT_IS_KEPT}"
        )
    rotary = batch.of_slots(batch.call.rotary_positions) if padded and batch.call.decoding else None
    layer = _layer_like(scope, batch, former)
    layer.kept = KeptTokens(
        None if positions is None else positions.to(torch.int32),
        batch.length,
        seen,
        padded,
        batch.padding(seen),
        None if rotary is None else rotary.to(torch.int32),
    )
    layer.rerotation = _rerotation(forward, batch, former, padded)
    layer.memories = _memories(scope, batch, former)
    return layer, batch.mean_kept


def _memories(scope: ScopeState, batch: BatchEviction, former: Any) -> dict[int, ScopeMemory]:
    """What each open scope knows of what is left."""
    before = dict(former.memories) if isinstance(former, PrunedLayer) else {}
    if batch.call.memory:
        before.setdefault(scope.key, NOTHING_KNOWN)
    memories = {}
    for key, memory in before.items():
        here = key == scope.key
        slots = batch.call.memory if here else memory.of_slots(batch.call.length)
        left = {name: batch.of_slots(known, empty=0) for name, known in slots.items()}
        told = {name: known for name, known in left.items() if known is not None}
        memories[key] = memory.after_pruning(told, by_this_scope=here)
    return memories


def _layer_like(scope: ScopeState, batch: BatchEviction, former: Any) -> PrunedLayer:
    """A layer that stores what is left as `former` does, and does not know yet what that is.

    Raises:
        UnsupportedCacheError: if it cannot.
    """
    storage = former.quantized if isinstance(former, PrefillStagingLayer) else storage_of(former)
    keys, values = batch.joined(KEYS, 0), batch.joined(VALUES, 0)
    if batch.evictions[0].channels is None:
        return pruned_layer(filled(storage, keys, values))
    _refuse_quantized(scope, former, "some channels of the keys")
    channels = batch.per_row(lambda eviction: _required(eviction.channels))
    head_dim = batch.call.keys.shape[-1]
    return ChannelPrunedLayer(filled(storage, keys, values), channels, head_dim)


def _required(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _refuse_quantized(scope: ScopeState, former: Any, kept: str) -> None:
    if isinstance(former, PrefillStagingLayer):
        raise UnsupportedCacheError(
            f"{type(scope.press).__name__} keeps {kept}, which a "
            f"{type(former.quantized).__name__} cannot store; use a DynamicCache"
        )


def _rerotation(
    forward: AttentionForward, batch: BatchEviction, former: Any, padded: bool
) -> Rerotation | None:
    """To which positions the keys that are left are rotated, if not to those they came with."""
    before = former.rerotation if isinstance(former, PrunedLayer) else None
    if all([eviction.rotary_positions is None for eviction in batch.evictions]):
        if before is None:
            return None
        # Padding between turns has not moved them on.
        known = _required(batch.call.rotary_positions)
        last = known.flatten(1).amax(dim=1)
        behind = n_seen(former) - before.shift - 1 - last
        return Rerotation(_required(batch.of_slots(known)), before.shift, behind)
    longest = max(eviction.next_position or eviction.length for eviction in batch.evictions)
    shift = 0 if before is None else before.shift
    n_shorter = n_seen(former) - shift - longest

    def lag(eviction: Eviction) -> Tensor:
        n = longest - (eviction.next_position or eviction.length)
        return torch.full((len(eviction.keys),), n, device=eviction.keys.device)

    def rotated_to(eviction: Eviction) -> Tensor:
        rotary = eviction.rotary_positions
        return eviction.known_kept if rotary is None else rotary

    positions = batch.joined(rotated_to, -1).to(torch.int32)
    row_lag = batch.per_row(lag)
    # The count of tokens seen is the model's clock: layers that keep their positions go by it too,
    # and so does the model's mask of a padded batch, which has columns for all tokens.
    if padded or forward.site.keeps_clock:
        return Rerotation(positions, shift, row_lag + n_shorter)
    return Rerotation(positions, shift + n_shorter, row_lag)


# ---- heads of different lengths ------------------------------------------------------------------


def _ragged(scope: ScopeState, batch: BatchEviction, former: Any) -> tuple[RaggedLayer, float]:
    """The layer whose heads differ in length, and how many tokens each keeps on average.

    Raises:
        UnsupportedCacheError: if the cache stores states in a way that heads share.
        UnsupportedInputError: if keys were rerotated.
    """
    _refuse_quantized(scope, former, "other tokens for each head")
    if any(eviction.rotary_positions is not None for eviction in batch.evictions):
        raise UnsupportedInputError(
            f"{type(scope.press).__name__} rerotates keys and keeps other tokens for each head, "
            "which no layer can tell later positions for; leave one of the two out"
        )

    def kept(eviction: Eviction) -> Tensor:
        if eviction.head_mask is not None:
            return eviction.head_mask
        return torch.ones_like(eviction.keys[..., 0], dtype=torch.bool)

    layer = RaggedLayer.of(
        batch.joined(KEYS, 0),
        batch.joined(VALUES, 0),
        batch.joined(kept, 0),
        _required(batch.kept_positions(former)),
        n_seen(former),
    )
    layer.mean_padding = n_seen(former) - batch.mean_seen
    if any(eviction.recent_scores is not None for eviction in batch.evictions):
        layer.remember(_recent_scores(batch))
    return layer, mean_kept(batch.call.site, layer)


def mean_kept(site: AttentionSite, layer: RaggedLayer) -> float:
    """How many tokens each head keeps on average, those of other ranks included."""
    return site.heads.mean(sum(layer.counts) / len(layer.counts))


def _recent_scores(batch: BatchEviction) -> Tensor:
    """`(B, H_kv, w)`, infinite where a row has fewer: padding is never evicted."""
    known = [_recent_of(eviction) for eviction in batch.evictions]
    longest = max(scores.shape[-1] for scores in known)
    return batch.per_row(lambda e: _pad_left(_recent_of(e), longest, float("inf")))


def _recent_of(eviction: Eviction) -> Tensor:
    """What is left to be judged late: as before, where a row got no token to decide about."""
    for recent in (eviction.recent_scores, eviction.call.recent_scores):
        if recent is not None:
            return recent
    return eviction.keys.new_zeros(*eviction.keys.shape[:2], 0)


def evict_late(
    forward: AttentionForward, scope: ScopeState, layer: RaggedLayer, batch: BatchEviction
) -> None:
    """Evict tokens from heads of different lengths some time after they came, and padding at once.

    Args:
        batch: what was decided about the forward's tokens.
    """
    if all(eviction.late_mask is None for eviction in batch.evictions):
        return
    _drop_padding(layer, batch)
    layer.remember(_recent_scores(batch))
    late = _late(batch)
    if late.any():
        layer.keep(_all_but(layer, late))
    kept = mean_kept(forward.site, layer)
    scope.record(forward.site.layer_idx, layer.seen - layer.mean_padding, kept)


def _drop_padding(layer: RaggedLayer, batch: BatchEviction) -> None:
    """Evict the padding of the forward's tokens, so that the last tokens of each head are real."""
    if all(group.slots is None for group in batch.groups):
        return
    padding = torch.zeros(batch.call.keys.shape[:3], dtype=torch.bool, device=layer.device)
    for group in batch.groups:
        if group.slots is not None:
            padding[group.rows] = True
            padding[torch.tensor(group.rows)[:, None], :, group.slots.to(layer.device)] = False
    layer.mean_padding += float(padding[:, 0].sum(dim=-1).float().mean())
    layer.keep(_all_but(layer, padding))


def _late(batch: BatchEviction) -> Tensor:
    """`(B, H_kv, m)` bool: which of the last `m` tokens of each head to evict."""

    def of_group(eviction: Eviction) -> Tensor:
        recent, late = _recent_of(eviction), eviction.late_mask
        stays = torch.zeros_like(recent, dtype=torch.bool)
        return stays if late is None else torch.cat((late, stays), dim=-1)

    longest = max(of_group(eviction).shape[-1] for eviction in batch.evictions)
    return batch.per_row(lambda eviction: _pad_left(of_group(eviction), longest, False))


def _all_but(layer: RaggedLayer, gone: Tensor) -> Tensor:
    """`(tokens of all heads,)` bool, head after head: all but those `gone` of the last `m`.

    Args:
        gone: `(B, H_kv, m)` bool.
    """
    ends = torch.tensor(layer.counts, device=layer.device).cumsum(0)
    width = gone.shape[-1]
    index = ends[:, None] - width + torch.arange(width, device=layer.device)
    kept = torch.ones(sum(layer.counts), dtype=torch.bool, device=layer.device)
    kept[index[gone.flatten(0, 1)]] = False
    return kept
