"""Cache layers that have lost tokens.

What was evicted is known by the cache layer and by nothing else: beside the storage of the states
stand a few values that say which tokens those are, so that lengths, positions and masks continue
correctly. Every kind of pruned layer answers in the same words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from press_core.cache.given import check_given_mask, check_given_tokens, check_mask_in_use
from press_core.cache.memory import Key, Memory
from press_core.cache.tokens import Kept, ReadingNeeds, extended, of_rows
from press_core.copies import copied
from press_core.errors import ScopeError, UnsupportedCacheError, UnsupportedInputError
from press_core.forward import OneMask, current

# transformers 5.2 crops to a length, later releases crop a number of tokens away.
_CROP_TAKES_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


def _of_inner(name: str) -> Any:
    return property(
        lambda layer: getattr(layer.inner, name),
        lambda layer, states: setattr(layer.inner, name, states),
    )


class PrunedLayer(DynamicLayer):
    """A layer that has lost tokens, or may lose some; as many of each head.

    It counts the tokens that it has *seen* (`get_seq_length`), so that positions continue, and
    tells the mask builder which columns are still there (`get_mask_sizes`). Tokens that arrive
    later are appended as in the layer of `transformers` that stores them. Other layers than growing
    ones are stored by subclasses; see `kinds`.

    Attributes:
        inner: that layer.
        keys, values: what is stored, `(B, H_kv, n_slots, d)` each; of a quantized layer what waits
            to be.
        kept: which tokens are left of those that it had seen when it was pruned last.
        needs: what a forward needs to read this layer.
        carried: by name, what the press wants to find again, `(B, ...)` each.
        memories: by scope, what it remembers of the layer.
        is_first: whether the model makes its one mask for this layer.
        is_unusable: whether an exception ended the forward that it was pruned in.
        room: of a buffer of fixed length how many slots it has behind the pruned part, for which
            the model always makes a mask; None: it grows.
        refusal: why no press can prune what is left; empty: one can.
        unreadable: what is said of a forward without the help that it needs.
    """

    is_unusable = False
    is_first = False
    room: int | None = None
    refusal = ""
    unreadable = (
        "this cache holds rows or layers of different lengths, which the model's own attention "
        "mask does not fit, or other positions than it counts with; keep the scope of the "
        "press open while decoding: `with press(model): model.generate(...)`"
    )

    keys: Any = _of_inner("keys")
    values: Any = _of_inner("values")

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._know_nothing()

    def _know_nothing(self) -> None:
        self.kept = Kept()
        self.needs = ReadingNeeds.NOTHING
        self.carried: dict[str, Tensor] = {}
        self.memories: dict[Key, Memory] = {}
        self._has_told_sizes = False

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("inner")  # of some layers, and while one is copied, None
        if inner is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    # ---- what is held ----------------------------------------------------------------------------

    @property
    def n_slots(self) -> int:
        """Slots physically held per head."""
        return int(self.inner.values.shape[-2]) if self.inner.is_initialized else 0

    @property
    def n_recent(self) -> int:
        """Slots of the tokens that came after the pruning."""
        return self.n_slots - self.kept.n_slots

    @property
    def n_seen(self) -> int:
        """Tokens that the layer has seen, padding included."""
        return self.kept.n_seen + self.n_recent

    @property
    def batch(self) -> int:
        """`B`."""
        return len(self.values)

    @property
    def n_counted(self) -> Any:
        """`n_recent` as the model counts it: of a buffer a tensor, so that one graph serves all."""
        return self.n_recent

    @property
    def is_compileable(self) -> bool:
        """Whether its shapes stay as they are."""
        return self.room is not None

    @property
    def n_old(self) -> int:
        """Columns of a mask for this layer that stand for the pruned part."""
        return self.kept.n_slots

    def columns(self, n_new: int) -> int:
        """Columns of the model's mask for `n_new` tokens more, if it is made for this layer."""
        return self.n_old + (self.n_recent + n_new if self.room is None else self.room)

    def old_seen(self, context: Tensor | None) -> Tensor | None:
        """Which of these columns are seen, `(1 or B, 1, H_kv or H, 1 or q, n)` bool; None: all.

        Args:
            context: which of all tokens up to the pruning, `(1 or B, 1 or H, 1 or q, S)` bool;
                None: all but padding.
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
        positions = self.positions
        if context.shape[1] > positions.shape[1]:  # of query heads
            group = context.shape[1] // positions.shape[1]
            positions = positions.repeat_interleave(group, dim=1)
        batch, heads, n = positions.shape
        context = context.to(self.device).expand(batch, heads, -1, -1)
        index = positions.long().clamp(min=0).unsqueeze(2).expand(-1, -1, context.shape[2], n)
        return context.gather(-1, index) & (positions >= 0).unsqueeze(2)

    @property
    def is_pruned(self) -> bool:
        """Whether tokens were evicted, or padding dropped, since the layer was last reset."""
        return self.kept.n_seen > 0

    @property
    def is_rerotated(self) -> bool:
        """Whether keys were rotated to other positions, from which later tokens continue."""
        return self.kept.following is not None

    @property
    def positions(self) -> Tensor | None:
        """`(B, H_kv, n)` int32: see `Kept`."""
        return self.kept.positions

    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, `(B, H_kv, n, d)` each."""
        return self.keys, self.values

    def all_positions(self) -> Tensor | None:
        """Position in the sequence of every slot, `(1 or B, 1 or H_kv, n_slots)`; None: unknown."""
        recent = torch.arange(self.kept.n_seen, self.n_seen, device=self.device)
        if not self.is_pruned:
            return recent.view(1, 1, -1)
        return None if self.positions is None else extended(self.positions, recent)

    def all_rotary_positions(self, real: Tensor | None = None) -> Tensor | None:
        """Rotary position of every slot where keys were rerotated, `(B, H_kv, n_slots)`.

        Args:
            real: `(B, n_recent)` bool, which tokens since then are no padding; None: all.
        """
        if self.kept.rotary is None or not self.is_rerotated:
            return None
        recent = self.following_positions(self.n_recent, real)
        return extended(self.kept.rotary.to(recent.device), recent.unsqueeze(1))

    def following_positions(self, n: int, real: Tensor | None) -> Tensor:
        """Rotary positions `(B, n)` of tokens behind rerotated keys; padding is not counted.

        Args:
            real: `(B, n)` bool, which are no padding; None: all.
        """
        if real is None:
            real = torch.ones(1, n, dtype=torch.bool, device=self.device)
        first = torch.tensor(self.kept.following, device=real.device)[:, None]
        return (first - 1 + real.cumsum(dim=-1)).clamp(min=0)

    def lengths(self) -> Tensor:
        """How many positions each head keeps, `(B, H_kv)` int64; empty slots do not count."""
        keys, _ = self.states()
        kept = torch.full(keys.shape[:2], self.n_slots, dtype=torch.int64, device=keys.device)
        if self.positions is not None:
            kept -= (self.positions < 0).sum(dim=-1).to(kept.device)
        return kept

    def holding(self, keys: Tensor, values: Tensor) -> PrunedLayer:
        """A layer like this that stores other states, and does not know yet which they are."""
        inner = copied(self.inner)
        if not inner.is_initialized:
            inner.lazy_initialization(keys, values)
        inner.keys, inner.values = keys, values
        return type(self)(inner)

    def check_shape(self, left: str) -> None:
        """Refuse, if states of which `left` is what is left cannot be stored as these are.

        Raises:
            UnsupportedCacheError: if so.
        """

    def settled(self) -> PrunedLayer:
        """What stores the states for good, once they have been judged and all are left."""
        return self

    def emptied(self) -> Any:
        """An empty layer of `transformers` of the same kind."""
        inner = copied(self.inner)
        inner.keys = inner.values = None
        inner.is_initialized = False
        inner.reset()
        return inner

    def remember(self, key: Key, memory: Memory | None) -> None:
        """Keep what a scope knows of this layer; None: nothing any more."""
        self.memories.pop(key, None)
        if memory is not None:
            self.memories[key] = memory

    # ---- what caches do --------------------------------------------------------------------------

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        self.inner.lazy_initialization(*args, **kwargs)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.check_readable(key_states)
        return self.inner.update(key_states, value_states, *args, **kwargs)

    def give_up(self) -> None:
        """Let nobody read it any more: an exception ended the forward that it was pruned in."""
        self.is_unusable = True

    def check_readable(self, keys: Tensor) -> None:
        """Refuse a forward that brings `keys` `(B, H_kv, q, d)` and has not the help it needs.

        Raises:
            ScopeError: saying which scope helps.
        """
        if self.is_unusable:
            raise ScopeError(
                "an exception ended the forward in which this cache was pruned: some of its layers "
                "are pruned and others are not; make a new one"
            )
        if self.needs is ReadingNeeds.NOTHING and not self.is_first:
            return
        n_new = keys.shape[2]
        helped = current.forward is not None and (
            current.reading is self or isinstance(current.reading, OneMask)
        )
        alone = ReadingNeeds.MASK_OF_MANY if n_new == 1 else ReadingNeeds.NOTHING
        if not helped and self.needs not in (ReadingNeeds.NOTHING, alone):
            raise ScopeError(self.unreadable)
        told = helped or self._has_told_sizes or torch.compiler.is_compiling()
        if self.is_first and self.is_pruned and not told:
            check_mask_in_use(self.n_seen, self.n_slots, n_new)
        self._has_told_sizes = False

    def get_seq_length(self) -> Any:
        return self.kept.n_seen - self.kept.shift + self.n_counted

    def get_mask_sizes(self, query_length: Any) -> tuple[Any, Any]:
        if isinstance(query_length, Tensor):  # transformers 5.2 passes cache_position
            query_length = len(query_length)
        self._has_told_sizes = True
        checked = self.is_pruned and ReadingNeeds.ATTENTION not in self.needs
        if checked and not torch.compiler.is_compiling():
            count = self.get_seq_length()
            if current.forward is None:
                check_given_mask(self.kept, self.n_seen, count, query_length)
            if query_length > 1:
                check_given_tokens(self.n_seen, count)
        if current.reading is OneMask.OF_ONE_COLUMN:
            return 1, self.n_seen
        return self.columns(query_length), self.kept.n_seen - self.kept.shift - self.n_old

    def crop(self, tokens: int) -> None:
        """Take the most recent tokens away again, down to where the layer was pruned.

        Args:
            tokens: as the installed transformers has it: minus the number of tokens to remove, or
                (5.2 also) the length to crop to.

        Raises:
            UnsupportedCacheError: if that would reach into the pruned part.
        """
        to_length = tokens > 0 or (tokens == 0 and _CROP_TAKES_LENGTH)
        remove = max(0, self.get_seq_length() - tokens) if to_length else -tokens
        if not remove:
            return
        if remove > self.n_recent:
            raise UnsupportedCacheError(
                f"cannot crop {remove} tokens off a pruned layer: {self.n_recent} came after the "
                "pruning, what was evicted before them cannot come back"
            )
        self.drop_last(remove)
        self.memories = {
            key: memory.without_last(remove, self.n_slots) for key, memory in self.memories.items()
        }

    def drop_last(self, n: int) -> None:
        """Forget the last `n` tokens of every head."""
        self.keys, self.values = self.keys[..., :-n, :], self.values[..., :-n, :]

    def reset(self) -> None:
        self.inner, self.is_unusable = self.emptied(), False
        self._know_nothing()

    def offload(self) -> None:
        self.inner.offload()

    def prefetch(self) -> None:
        self.inner.prefetch()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._hold_rows(beam_idx, self.select_rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            rows = torch.arange(self.batch, device=self.values.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            rows = torch.arange(self.batch, device=indices.device)[indices]  # of a mask, too
            self._hold_rows(rows, self.select_rows)

    def _hold_rows(self, rows: Tensor, select: Callable[[Tensor], None]) -> None:
        if not self.is_initialized:
            return
        batch = self.batch
        select(rows)
        known = self.kept, self.carried, self.memories
        self.kept, self.carried, self.memories = of_rows(known, rows, batch)

    def select_rows(self, rows: Tensor) -> None:
        """Store some rows of the batch."""
        self.inner.reorder_cache(rows)
