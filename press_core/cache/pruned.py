"""Cache layers from which tokens were evicted.

A pruned layer is the only record of what was evicted from it. Beside keys and values it stores
which tokens they belong to, so that sequence lengths, positions and masks of later forwards are
right. All kinds of pruned layers share the interface of `PrunedLayer`.
"""

from __future__ import annotations

import inspect
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from press_core.cache import given
from press_core.cache.memory import Key, Memories, Memory
from press_core.cache.tokens import Kept, ReadingNeeds, extended, of_rows
from press_core.errors import ScopeError, UnsupportedCacheError, UnsupportedInputError
from press_core.forward import OneMask, current
from press_core.traits import Evicts

# transformers 5.2 crops to a length; later releases take the number of tokens to remove.
CROP_TAKES_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def _of_inner(name: str) -> Any:
    def assign(layer: Any, states: Tensor) -> None:
        given.check_states(layer, name, states)
        setattr(layer.inner, name, states)

    return property(lambda layer: getattr(layer.inner, name), assign)


class PrunedLayer(DynamicLayer):
    """A layer that was pruned or can be pruned, with the same number of tokens in every head.

    `get_seq_length` counts the tokens *seen*, so that positions continue; `get_mask_sizes` counts
    the slots that are stored. A wrapped layer of `transformers` stores the states and appends new
    tokens. Subclasses support layers that do not grow by concatenation; see `caches.KINDS`.

    Attributes:
        inner: the wrapped layer.
        keys, values: stored states, `(B, H_kv, n_slots, d)` each; in a quantized layer only the
            states that are not quantized yet.
        kept: which of the tokens seen up to the last pruning are kept.
        needs: what a forward needs to read this layer.
        carried: by name, tensors `(B, ...)` that a press stores for its next call.
        memories: by scope, what the scope remembers of this layer.
        is_first: whether the model builds its one mask from the sizes of this layer.
        is_unusable: whether an exception ended the forward that pruned this layer, or a crop.
        has_sized_mask: whether a mask was built for its slots since it was last read.
        refusal: why a press cannot prune this layer again; empty: it can.
        unreadable: error message for a forward that lacks what `needs` lists.
        stores, storage: the most that a press may evict from it, and why, for messages.
        is_croppable: whether its latest tokens can be removed.
    """

    is_unusable = False
    is_first = False
    stores, storage = Evicts.CHANNELS, ""
    is_croppable = True
    refusal = ""
    unreadable = (
        "this cache holds rows or layers of different lengths, which the model's own attention "
        "mask does not fit, or other positions than it counts with; keep the scope of the "
        "press open while decoding: `with press(model): model.generate(...)`"
    )

    keys: Any = _of_inner("keys")
    values: Any = _of_inner("values")
    lazy_initialization: Any = _of_inner("lazy_initialization")
    offload: Any = _of_inner("offload")
    prefetch: Any = _of_inner("prefetch")
    max_batch_size: Any = property(lambda layer: layer.batch)  # transformers 5.2 asks static caches

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._reset_metadata()

    def _reset_metadata(self) -> None:
        self.kept = Kept()
        self.needs = ReadingNeeds.NOTHING
        self.carried: dict[str, Tensor] = {}
        self.memories = Memories()
        self.has_sized_mask = False

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("inner")  # None in ragged layers, and while a layer is copied
        if inner is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    # ---- contents --------------------------------------------------------------------------------

    @property
    def n_slots(self) -> int:
        """Slots stored per head (physical length)."""
        return int(self.inner.values.shape[-2]) if self.inner.is_initialized else 0

    @property
    def n_recent(self) -> int:
        """Slots of the tokens appended after pruning."""
        return self.n_slots - self.kept.n_slots

    @property
    def n_seen(self) -> int:
        """Tokens that the layer has seen, padding included (logical length)."""
        return self.kept.n_seen + self.n_recent

    @property
    def batch(self) -> int:
        """`B`."""
        return len(self.values)

    @property
    def n_counted(self) -> Any:
        """`n_recent` for the model; a tensor in a buffer, so one graph fits every length."""
        return self.n_recent

    @property
    def room(self) -> int | None:
        """In a buffer of fixed length, the slots after the pruned part; None: the layer grows.

        The model always builds a mask for all of them.
        """
        return None

    @property
    def is_compileable(self) -> bool:
        """Whether the shapes of its states are fixed."""
        return self.room is not None

    @property
    def n_old(self) -> int:
        """Mask columns of the pruned part."""
        return self.kept.n_slots

    def columns(self, n_new: int) -> int:
        """Columns of a mask that the model builds for this layer and `n_new` more tokens."""
        return self.n_old + (self.n_recent + n_new if self.room is None else self.room)

    def has_column_for_each_token(self, mask: Tensor, n_new: int) -> bool:
        """Whether `mask` has a column for each token that was seen and each of `n_new` more.

        For a buffer it may have columns for all tokens that the cache was made for.
        """
        return mask.shape[-1] in (self.n_seen + n_new, self.room and self.get_max_length())

    def old_seen(self, context: Tensor | None) -> Tensor | None:
        """Which slots of the pruned part are visible; None: all.

        Args:
            context: which of the tokens seen up to the last pruning are visible,
                `(1 or B, 1 or H, 1 or q, S)` bool; None: all except padding.

        Returns:
            `(B, H_kv or H, 1 or q, n)` bool, or `(B, 1, 1, n)` where `context` is None.

        Raises:
            UnsupportedInputError: if `context` is given and the kept positions are unknown.
        """
        occupied = self.kept.occupied(self.device)
        if context is None:
            return None if occupied is None else occupied[:, None, None]
        if self.positions is None:
            raise UnsupportedInputError(
                "the attention_mask hides tokens of a context that a press has pruned without "
                "saying which tokens it kept; let its compress return Eviction.keep(call, "
                "positions)"
            )
        group = max(1, context.shape[1] // self.positions.shape[1])
        positions = self.positions.repeat_interleave(group, dim=1)  # one mask per query head
        batch, heads, n = positions.shape
        context = context.to(self.device).expand(batch, heads, -1, -1)
        index = positions.long().clamp(min=0).unsqueeze(2).expand(-1, -1, context.shape[2], n)
        return context.gather(-1, index) & (positions >= 0).unsqueeze(2)

    @property
    def is_pruned(self) -> bool:
        """Whether tokens were evicted, or padding dropped, since the last reset."""
        return self.kept.n_seen > 0

    @property
    def is_rerotated(self) -> bool:
        """Whether keys were rotated to other positions, from which new tokens continue."""
        return self.kept.following is not None

    @property
    def positions(self) -> Tensor | None:
        """`(B, H_kv, n)` int32; see `Kept`."""
        return self.kept.positions

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, `(B, H_kv, n, d)` each."""
        return self.keys, self.values

    def all_positions(self) -> Tensor | None:
        """Sequence position of every slot, `(1 or B, 1 or H_kv, n_slots)`; None: unknown."""
        recent = torch.arange(self.kept.n_seen, self.n_seen, device=self.device)
        if not self.is_pruned:
            return recent.view(1, 1, -1)
        return None if self.positions is None else extended(self.positions, recent)

    def all_rotary_positions(self, real: Tensor | None = None) -> Tensor | None:
        """Rotary position of every slot, `(B, H_kv, n_slots)`; None: keys were not rerotated.

        Args:
            real: `(B, n_recent)` bool, which tokens appended since are not padding; None: all.
        """
        if self.kept.rotary is None or not self.is_rerotated:
            return None
        recent = self.following_positions(self.n_recent, real)
        return extended(self.kept.rotary.to(recent.device), recent.unsqueeze(1))

    def following_positions(self, n: int, real: Tensor | None) -> Tensor:
        """Rotary positions `(B, n)` of tokens after the pruned part; padding is not counted.

        Args:
            real: `(B, n)` bool, which of them are not padding; None: all.
        """
        if real is None:
            real = torch.ones(1, n, dtype=torch.bool, device=self.device)
        following = self.kept.following or (self.kept.n_seen,) * self.batch
        first = torch.tensor(following, device=real.device)[:, None]
        return (first - 1 + real.cumsum(dim=-1)).clamp(min=0)

    def lengths(self) -> Tensor:
        """Tokens stored per head, `(B, H_kv)` int64; empty slots do not count."""
        keys, _ = self.states()
        kept = torch.full(keys.shape[:2], self.n_slots, dtype=torch.int64, device=keys.device)
        if self.positions is not None:
            kept -= (self.positions < 0).sum(dim=-1).to(kept.device)
        return kept

    def holding(self, keys: Tensor, values: Tensor) -> PrunedLayer:
        """A layer of the same kind that stores `keys` and `values`; its `kept` is not set."""
        inner = copy(self.inner)
        if not inner.is_initialized:
            inner.lazy_initialization(keys, values)
        inner.keys, inner.values = keys, values
        return type(self)(inner)

    def beginning(self, keys: Tensor, values: Tensor) -> PrunedLayer:
        """A layer of the same kind that shares no storage with this one; see `holding`."""
        return self.holding(keys, values)

    def stop_sharing(self) -> None:
        """Let changes in place leave the states alone that `update` has returned."""

    def check_stores(self, evicts: Evicts, late: bool = False) -> None:
        """Raise if it cannot store what `evicts` leaves, or what is evicted `late`, by head."""
        if evicts > self.stores or (late and self.room is not None):
            raise UnsupportedCacheError(f"{self.storage}; a press evicts more, use a DynamicCache")

    def settled(self) -> PrunedLayer:
        """The layer that stores the states after a press has kept all of them."""
        return self

    def emptied(self) -> Any:
        """An empty layer of `transformers` of the same kind."""
        inner = copy(self.inner)
        inner.keys = inner.values = None
        inner.is_initialized = False
        inner.reset()
        return inner

    def memory(self, key: Key) -> Memory:
        """What a scope remembers of this layer; at first an empty memory."""
        return self.memories.get(key, Memory())

    def remember(self, key: Key, memory: Memory | None) -> None:
        """Store the memory of a scope for this layer; None removes it."""
        if memory is None:
            self.memories.pop(key, None)
        else:
            self.memories[key] = memory

    # ---- cache layer interface -------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.check_readable(key_states)
        return self.inner.update(key_states, value_states, *args, **kwargs)

    def check_readable(self, keys: Tensor) -> None:
        """Raise if the layer cannot be read correctly in this forward.

        Args:
            keys: of the new tokens, `(B, H_kv, q, d)`.

        Raises:
            ScopeError: if the layer is unusable, or if the forward lacks what `needs` lists.
            UnsupportedInputError: if the caller's mask does not fit the stored slots.
        """
        if self.is_unusable:
            raise ScopeError(
                "an exception ended the forward in which this cache was pruned, or a crop: some of "
                "its layers have lost tokens and others have not; make a new one"
            )
        if self.needs is ReadingNeeds.NOTHING and not self.is_first:
            return
        n_new = keys.shape[2]
        forward = current.forward
        reading = None if forward is None else forward.reading
        helped = reading is self or isinstance(reading, OneMask)
        if not helped and self.needs is not ReadingNeeds.NOTHING:
            # A model that is exported, or compiled by transformers 5.2, also masks a single token.
            compiler = torch.compiler
            traced = compiler.is_compiling if CROP_TAKES_LENGTH else compiler.is_exporting
            is_unmasked = n_new == 1 and not traced() and given.is_unmasked()
            if self.needs is not ReadingNeeds.MASK_OF_MANY or not is_unmasked:
                raise ScopeError(self.unreadable)
        if self.is_first and self.is_pruned and not (helped or torch.compiler.is_compiling()):
            given.check_arguments(self, n_new)
        self.has_sized_mask = False

    def get_seq_length(self) -> Any:
        return self.kept.n_seen - self.kept.shift + self.n_counted

    def get_mask_sizes(self, query_length: Any) -> tuple[Any, Any]:
        if isinstance(query_length, Tensor):  # traced, or cache_position of transformers 5.2
            query_length = len(query_length) if query_length.dim() else int(query_length)
        self.has_sized_mask = True
        forward = current.forward
        if self.is_pruned and not torch.compiler.is_compiling():
            alone = forward is None and not self.needs & ReadingNeeds.ATTENTION
            given.check_sizes(self, query_length, alone)
        if forward is not None and forward.reading is OneMask.OF_ONE_COLUMN:
            return 1, self.n_seen
        return self.columns(query_length), self.kept.n_seen - self.kept.shift - self.n_old

    def crop(self, tokens: int) -> None:
        """Remove the latest tokens; only tokens appended after pruning can be removed.

        Args:
            tokens: as in the installed transformers: minus the number of tokens to remove, or
                (5.2 also) the length to crop to.

        Raises:
            UnsupportedCacheError: if fewer tokens were appended after pruning.
        """
        to_length = tokens > 0 or (tokens == 0 and CROP_TAKES_LENGTH)
        remove = max(0, self.get_seq_length() - tokens) if to_length else -tokens
        if not remove:
            return
        counted = [x for memory in self.memories.values() for x in memory.slots.values()]
        n_free = min([self.n_recent, *[self.n_slots - x.shape[-1] for x in counted]])
        if remove > n_free:
            self.is_unusable |= given.is_cropped_before(self)
            raise UnsupportedCacheError(
                f"cannot crop {remove} tokens off a pruned layer: {n_free} came after the pruning "
                "and were not counted by a press that adds attention up, and what these have done "
                "cannot be undone; crop no more than these, and open no scope on the assistant of "
                "speculative decoding, whose cache is cropped"
            )
        if not self.is_croppable:
            raise UnsupportedCacheError(f"{type(self.inner).__name__} cannot remove latest tokens")
        self.drop_last(remove)
        known = self.memories.items()
        self.memories = Memories({key: memory.without_last(remove) for key, memory in known})

    def drop_last(self, n: int) -> None:
        """Remove the last `n` tokens of every head."""
        self.inner.keys, self.inner.values = (x[..., :-n, :] for x in (self.keys, self.values))

    def reset(self) -> None:
        self.inner, self.is_unusable = self.emptied(), False
        self._reset_metadata()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.is_initialized:
            return
        batch = self.batch
        rows = torch.arange(batch, device=indices.device)[indices]  # it may be a bool mask
        self.select_rows(rows)
        known = self.kept, self.carried, self.memories
        self.kept, self.carried, memories = of_rows(known, rows, batch)
        self.memories = Memories(memories)

    def select_rows(self, rows: Tensor) -> None:
        """Keep the states of the batch rows `rows`, in this order; rows may repeat."""
        self.inner.reorder_cache(rows)
