"""Cache layers from which tokens were evicted.

What was evicted is known by the cache layer and by nothing else: around the layer of `transformers`
that stores the states stand a few values that say which tokens those are, so that lengths,
positions and masks continue correctly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from press_core.cache.masks import given_mask
from press_core.cache.recent import NO_STATES, RecentStates
from press_core.copies import copied
from press_core.errors import ScopeError, UnsupportedCacheError, UnsupportedInputError
from press_core.model.generation import tokens_cut_by_generate

# transformers 5.2 crops to a length, later releases crop a number of tokens away.
_CROP_TAKES_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters

# Later releases than 5.2 reorder what is quantized when they next dequantize it.
_REORDERS_QUANTIZED = hasattr(QuantizedLayer, "_apply_pending_reorder")


class Reader(Protocol):
    """Whoever helps with reading a layer that the model alone cannot read: an open scope."""

    @property
    def is_open(self) -> bool: ...


class ReadingNeeds(Flag):
    """What a forward needs to read a pruned layer, and the model does not give it."""

    NOTHING = 0
    MASK = auto()
    """A mask of its own."""
    MASK_OF_MANY = auto()
    """A mask of its own where several tokens come at once."""
    POSITIONS = auto()
    """Positions other than those that the model counts."""


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """What is left of the tokens that a layer had seen when it was pruned last.

    Attributes:
        positions: `(B, H_kv, n)` int32, ascending: position in the sequence of each slot; -1 marks
            an empty one (rows of a padded batch keep different numbers of tokens, aligned on the
            right). None: the press did not say.
        n_slots: `n`.
        n_seen: tokens that the layer had seen, padding included.
        padded: whether the batch was padded, so that the mask that the model builds from the
            uncompressed sequence would hide the wrong keys.
        padding: `(B,)` int64, on the CPU: how much of what the layer had seen was padding. None:
            nothing.
        rotary_positions: `(B, H_kv, n)` int32: to which position each kept key is rotated, where
            padding between turns separates that from `positions`; None: padding came first.
    """

    positions: Tensor | None = None
    n_slots: int = 0
    n_seen: int = 0
    padded: bool = False
    padding: Tensor | None = None
    rotary_positions: Tensor | None = None

    def of_rows(self, rows: Tensor) -> KeptTokens:
        """The same for some rows of the batch."""
        return replace(
            self,
            positions=_rows(self.positions, rows),
            padding=_rows(self.padding, rows),
            rotary_positions=_rows(self.rotary_positions, rows),
        )


@dataclass(frozen=True, eq=False)
class Rerotation:
    """Where the kept keys were rotated to; later tokens continue from there.

    Attributes:
        positions: `(B, H_kv, n)` int32, of the kept tokens.
        shift: by how many tokens the layer counts less than it has seen.
        row_lag: `(B,)` int64, by how much rows lag behind that count; None: by nothing.
    """

    positions: Tensor
    shift: int = 0
    row_lag: Tensor | None = None

    def of_rows(self, rows: Tensor) -> Rerotation:
        """The same for some rows of the batch."""
        positions = _rows(self.positions, rows)
        assert positions is not None
        return Rerotation(positions, self.shift, _rows(self.row_lag, rows))


@dataclass(frozen=True, eq=False)
class Sinks:
    """The first keys of each row before RoPE, where they are rerotated again and again.

    Attributes:
        keys: `(B, H_kv, n_sink, d)`.
        known: `(B,)` bool, of which rows they are known.
    """

    keys: Tensor
    known: Tensor

    def of_rows(self, rows: Tensor) -> Sinks:
        """The same for some rows of the batch."""
        return Sinks(self.keys[rows.to(self.keys.device)], self.known[rows.to(self.known.device)])


@dataclass(frozen=True, eq=False)
class ScopeMemory:
    """What an open scope knows of a layer beside what lies in it.

    Attributes:
        n_steps: forwards while decoding since it pruned the layer last.
        states: by name, what is known of the last tokens since then.
        runs: `(q, n)` for `n` forwards of `q` tokens, one after the other: the latest of `n_steps`.
        is_prefill: whether a prefill is under way, which comes in chunks; it knows all tokens then.
        slots: by name, what is known of each slot: `(B, H_kv, n)` each; tokens that came since it
            was brought up to date have none yet.
        n_forwards: all forwards while decoding.
    """

    n_steps: int = 0
    states: dict[str, RecentStates] = field(default_factory=dict)
    runs: tuple[tuple[int, int], ...] = ()
    is_prefill: bool = False
    slots: Mapping[str, Tensor] = field(default_factory=dict)
    n_forwards: int = 0

    def after_step(self, n_new: int, limit: int | None = 0, **states: Tensor) -> ScopeMemory:
        """The memory with `n_new` tokens more, and their states.

        Args:
            limit: of how many tokens before those the states are still needed; None: of all.
        """
        # What is there stays until more follow, so that the new tokens can be taken back.
        new = {
            name: self.states.get(name, NO_STATES).followed_by(x, limit)
            for name, x in states.items()
        }
        return copied(
            self,
            n_steps=self.n_steps + 1,
            states={**self.states, **new},
            runs=_with_run(self.runs, n_new),
            n_forwards=self.n_forwards + 1,
        )

    def last(self, limit: int) -> dict[str, Tensor]:
        """The states of the last `limit` tokens."""
        return {name: states.last(limit) for name, states in self.states.items()}

    def after_pruning(self, slots: Mapping[str, Tensor], by_this_scope: bool) -> ScopeMemory:
        """The memory of a layer of which `slots` is what is known of those that are left."""
        if self.is_prefill and not by_this_scope:
            return replace(self, slots=slots)
        n_steps = 0 if by_this_scope else self.n_steps
        return replace(self, n_steps=n_steps, states={}, runs=(), is_prefill=False, slots=slots)

    def of_slots(self, n: int) -> dict[str, Tensor]:
        """What is known of the first `n` slots, zeros of those that came since."""
        missing = {name: n - x.shape[-1] for name, x in self.slots.items()}
        return {name: pad(x, (0, missing[name])) for name, x in self.slots.items()}

    def of_rows(self, rows: Tensor) -> ScopeMemory:
        """The same for some rows of the batch."""
        states = {name: known.of_rows(rows) for name, known in self.states.items()}
        slots = {name: x[rows.to(x.device)] for name, x in self.slots.items()}
        return replace(self, states=states, slots=slots)

    def without_last(self, n: int, n_slots: int) -> ScopeMemory:
        """The same as if the last `n` tokens, which were taken back, had never come.

        Args:
            n_slots: what is then left in the layer.
        """
        states = {name: known.without_last(n) for name, known in self.states.items()}
        slots = {name: x[..., :n_slots] for name, x in self.slots.items()}
        runs, n_steps = list(self.runs), self.n_steps
        while n and runs:
            width, count = runs.pop()
            gone = min(count, n // width) if width else count
            n, n_steps, count = n - gone * width, n_steps - gone, count - gone
            if count and n:  # part of a forward is left
                runs += [(width, count - 1)] * (count > 1) + [(width - n, 1)]
                break
            runs += [(width, count)] * (count > 0)
        return replace(self, n_steps=n_steps, states=states, slots=slots, runs=tuple(runs))


NOTHING_KNOWN = ScopeMemory()
"""What a scope knows of a layer at first."""


def _with_run(runs: tuple[tuple[int, int], ...], width: int) -> tuple[tuple[int, int], ...]:
    if runs and runs[-1][0] == width:
        return (*runs[:-1], (width, runs[-1][1] + 1))
    return (*runs, (width, 1))


class PrunedLayer(DynamicLayer):
    """A layer of `transformers`, and what is known of the tokens that it has lost.

    It counts the tokens that it has *seen* (`get_seq_length`), so that positions continue, and
    tells the mask builder which columns are still there (`get_mask_sizes`). Tokens that arrive
    later are appended as in the layer that stores them.

    Attributes:
        storage: the layer that stores the states: dynamic or quantized.
        kept: which tokens are left; none were evicted before it says so.
        rerotation: where their keys were rotated to, or None: where they had been.
        needs: what a forward needs to read this layer.
        sinks: for a press that rerotates the first keys again and again.
        memories: by scope, what it knows of the layer.
        is_torn: whether other layers were to be pruned as this one was, and no longer were.
    """

    is_torn = False

    def __init__(self, storage: DynamicLayer) -> None:
        self.storage = storage  # in place of tensors of its own
        self._know_nothing()

    def _know_nothing(self) -> None:
        self.kept = KeptTokens()
        self.rerotation: Rerotation | None = None
        self.needs = ReadingNeeds.NOTHING
        self.sinks: Sinks | None = None
        self.memories: dict[int, ScopeMemory] = {}
        self._reader: Reader | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "storage":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.storage, name)

    @property
    def keys(self) -> Any:
        """What is stored, `(B, H_kv, n_slots, d)`; of a quantized layer what waits to be."""
        return self.storage.keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self.storage.keys = keys

    @property
    def values(self) -> Any:
        return self.storage.values

    @values.setter
    def values(self, values: Any) -> None:
        self.storage.values = values

    # ---- what is held ----------------------------------------------------------------------------

    @property
    def n_slots(self) -> int:
        """Slots physically held per head."""
        return int(self.storage.get_seq_length())

    @property
    def n_recent(self) -> int:
        """Slots of the tokens that came after the pruning."""
        return self.n_slots - self.kept.n_slots

    @property
    def n_seen(self) -> int:
        """Tokens that the layer has seen, padding included."""
        return self.kept.n_seen + self.n_recent

    @property
    def is_pruned(self) -> bool:
        """Whether tokens were evicted, or padding dropped, since the layer was last reset."""
        return self.kept.n_slots > 0

    @property
    def positions(self) -> Tensor | None:
        """`(B, H_kv, n)` int32: see `KeptTokens`."""
        return self.kept.positions

    def occupied(self) -> Tensor:
        """`(B, n)` bool: which slots of the pruned part hold a token."""
        if self.positions is None:  # the press did not say, so rows are of one length
            shape = self.values.shape[0], self.kept.n_slots
            return torch.ones(shape, dtype=torch.bool, device=self.device)
        return self.positions[:, 0] >= 0

    def all_positions(self) -> Tensor | None:
        """Position in the sequence of every slot, `(1 or B, 1 or H_kv, n_slots)`, or None."""
        recent = torch.arange(self.kept.n_seen, self.n_seen, device=self.device)
        if not self.is_pruned:
            return recent.view(1, 1, -1)
        return None if self.positions is None else _extended(self.positions, recent)

    def all_rotary_positions(self) -> Tensor | None:
        """Rotary position of every slot where keys were rerotated, `(B, H_kv, n_slots)`."""
        rerotation = self.rerotation
        if rerotation is None:
            return None
        start = self.kept.n_seen - rerotation.shift
        recent = torch.arange(start, start + self.n_recent, device=self.device)
        if rerotation.row_lag is not None:
            recent = recent - rerotation.row_lag.view(-1, 1, 1)
        return _extended(rerotation.positions, recent)

    # ---- who may read it -------------------------------------------------------------------------

    def allow_update(self, reader: Reader) -> None:
        """Let the next update happen, which comes with all the help it needs from `reader`."""
        self._reader = reader

    def disallow_update(self) -> None:
        """No longer let it happen."""
        self._reader = None

    @property
    def is_allowed(self) -> bool:
        """Whether the next update may happen: while the scope that said so is open."""
        return self._reader is not None and self._reader.is_open

    def _check_allowed(self, n_new: int) -> None:
        if self.is_torn:
            raise ScopeError(
                "the scope of a press was closed, or an exception raised, in the middle of a "
                "forward: some layers of this cache are pruned and others are not; make a new one"
            )
        nothing = ReadingNeeds.NOTHING, ReadingNeeds.MASK_OF_MANY if n_new == 1 else None
        if self.needs not in nothing and not self.is_allowed:
            raise ScopeError(
                "this cache holds rows or layers of different lengths, which the model's own "
                "attention mask does not fit, or other positions than it counts with; keep the "
                "scope of the press open while decoding: `with press(model): model.generate(...)`"
            )
        self._reader = None

    # ---- what caches do --------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.storage.lazy_initialization(key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._check_allowed(key_states.shape[2])
        return self.storage.update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        shift = 0 if self.rerotation is None else self.rerotation.shift
        return self.n_seen - shift

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # transformers 5.2 passes cache_position
            query_length = len(query_length)
        if self.get_seq_length() != self.n_seen:
            self._check_columns(self.get_seq_length() + query_length)
            if query_length > 1:
                self._check_cut()
        return self.n_slots + query_length, self.get_seq_length() - self.n_slots

    def _check_columns(self, n_columns: int) -> None:
        """Refuse a mask with padding whose columns are not those that the model will take."""
        mask = given_mask()
        if mask is None or mask.shape[1] <= n_columns or bool(mask.all()):
            return
        raise UnsupportedInputError(
            f"an attention_mask of {mask.shape[1]} columns hides padding from a cache whose keys "
            f"were rotated to other positions, so that the model counts {n_columns} tokens; open "
            "the scope of the press that rotated them, or pass the last columns, mask = "
            f"attention_mask[:, -{n_columns}:], and the positions that count in them, "
            "(mask.cumsum(-1) - 1)[:, -q:] of q tokens"
        )

    def _check_cut(self) -> None:
        """Refuse tokens of which `generate` takes some for new that may have been seen."""
        given, clock = tokens_cut_by_generate(), self.get_seq_length()
        if given is None or given <= self.n_seen:
            return
        raise UnsupportedInputError(
            f"generate was given {given} tokens and cuts off as many as the cache counts: {clock}, "
            f"where it has seen {self.n_seen}, as its keys were rotated to other positions; run "
            "the new tokens but the last first, model(new[:, :-1], past_key_values=cache), and "
            f"give generate all tokens but the first {self.n_seen - clock}"
        )

    def crop(self, tokens: int) -> None:
        """Take the most recent tokens away again, down to where the layer was pruned.

        Args:
            tokens: as the installed transformers has it: minus the number of tokens to remove, or
                (5.2 also) the length to crop to.

        Raises:
            UnsupportedCacheError: if that would reach into the pruned part.
        """
        remove = n_to_remove(self, tokens)
        if not remove:
            return
        if is_quantized(self):
            raise UnsupportedCacheError("a quantized layer cannot give back its latest tokens")
        check_crop(self, remove)
        self._drop_last(remove)
        self.memories = {
            key: memory.without_last(remove, self.n_slots) for key, memory in self.memories.items()
        }

    def _drop_last(self, n: int) -> None:
        self.keys, self.values = self.keys[..., :-n, :], self.values[..., :-n, :]

    def reset(self) -> None:
        self.storage, self.is_torn = emptied(self.storage), False
        self._know_nothing()

    def offload(self) -> None:
        self.storage.offload()

    def prefetch(self) -> None:
        self.storage.prefetch()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if not _REORDERS_QUANTIZED:
            self._refuse_rows_of_quantized()
        self._of_rows(lambda: self.storage.reorder_cache(beam_idx), beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._refuse_rows_of_quantized()
        self._of_rows(lambda: self.storage.batch_select_indices(indices), indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse_rows_of_quantized()
        batch = self.values.shape[0] if self.n_slots else 0
        rows = torch.arange(batch).repeat_interleave(repeats)
        self._of_rows(lambda: self.storage.batch_repeat_interleave(repeats), rows)

    def _of_rows(self, select_stored: Callable[[], None], rows: Tensor) -> None:
        """Become the layer of some rows of the batch."""
        select_stored()
        self.kept = self.kept.of_rows(rows)
        self.rerotation = self.rerotation and self.rerotation.of_rows(rows)
        self.sinks = self.sinks and self.sinks.of_rows(rows)
        self.memories = {key: memory.of_rows(rows) for key, memory in self.memories.items()}

    def _refuse_rows_of_quantized(self) -> None:
        # transformers would select those of the tokens that wait to be quantized, and no others.
        if is_quantized(self):
            raise UnsupportedCacheError(
                "rows of a quantized layer cannot be selected or repeated, nor its beams reordered "
                "by transformers 5.2; use a DynamicCache, or a newer transformers for beam search"
            )


HybridLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
"""The layer of models that attend and keep a linear state in one; transformers 5.2 has none."""


class _PrunedHybridLayer(PrunedLayer):
    """A pruned layer that keeps the state of a linear attention beside its keys and values."""

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        return self.storage.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        return self.storage.update_recurrent_state(*args, **kwargs)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        self.storage.lazy_initialization(*args, **kwargs)

    def crop(self, tokens: int) -> None:
        if n_to_remove(self, tokens):
            raise UnsupportedCacheError(
                "a pruned layer with a linear state cannot give back its latest tokens"
            )

    def reset(self) -> None:
        super().reset()
        self.storage.reset()


if HybridLayer is not None:
    # The state of a layer is written only to a layer that is known to have one.
    cache_utils.LinearAttentionCacheLayerMixin.register(_PrunedHybridLayer)


def pruned_layer(storage: DynamicLayer) -> PrunedLayer:
    """A layer over `storage` that nothing was evicted from yet."""
    hybrid = HybridLayer is not None and isinstance(storage, HybridLayer)
    return (_PrunedHybridLayer if hybrid else PrunedLayer)(storage)


class ChannelPrunedLayer(PrunedLayer):
    """A pruned layer that stores some channels of its keys only, and all of those that come later.

    Attributes:
        keys: `(B, H_kv, n, d')`, of the pruned part.
        channels: `(B, H_kv, d')` int64, which channels those are.
        recent_keys: `(B, H_kv, m, d)`, of the tokens that came later.
        values: `(B, H_kv, n + m, d)`.
    """

    def __init__(self, storage: DynamicLayer, channels: Tensor, head_dim: int) -> None:
        super().__init__(storage)
        self.channels = channels
        self.recent_keys = self.keys.new_empty(*self.keys.shape[:2], 0, head_dim)
        self._attending: Reader | None = None

    def allow_attention(self, reader: Reader) -> None:
        """Let the next update happen: the attention function of `reader` reads the layer itself."""
        self._attending = self._reader = reader

    def disallow_update(self) -> None:
        super().disallow_update()
        self._attending = None

    @property
    def n_slots(self) -> int:
        return int(self.values.shape[-2]) if self.is_initialized else 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:  # reset
            raise ScopeError("this cache was reset while it had lost channels; make a new one")
        if self._attending is None or not self._attending.is_open:
            raise ScopeError(
                "this cache stores some channels of its keys only, which the model's own attention "
                "cannot read; decode inside the scope of the press, or inside "
                "`with attention_patch.headwise(model): ...`"
            )
        self._check_allowed(key_states.shape[2])
        self._attending = None
        self.recent_keys = torch.cat((self.recent_keys, key_states), dim=-2)
        self.values = torch.cat((self.values, value_states), dim=-2)
        return key_states, value_states

    def _drop_last(self, n: int) -> None:
        self.recent_keys, self.values = self.recent_keys[..., :-n, :], self.values[..., :-n, :]

    def _of_rows(self, select_stored: Callable[[], None], rows: Tensor) -> None:
        if self.is_initialized:
            super()._of_rows(select_stored, rows)
            rows = rows.to(self.channels.device)
            self.channels, self.recent_keys = self.channels[rows], self.recent_keys[rows]

    def reset(self) -> None:
        super().reset()
        self.channels = self.recent_keys = None  # type: ignore[assignment]

    def offload(self) -> None:
        raise UnsupportedCacheError(
            "a cache with some channels of its keys cannot be offloaded: attention reads it in "
            "place; use a DynamicCache without offloading"
        )


class PrefillStagingLayer(DynamicLayer):
    """Stands in for an empty quantized layer during a prefill, so that exact keys are judged."""

    def __init__(self, quantized: QuantizedLayer) -> None:
        super().__init__()
        self.quantized = quantized

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            self._refuse()
        return super().update(key_states, value_states, *args, **kwargs)

    def reset(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        raise UnsupportedCacheError(
            "the prefill of this quantized cache failed, and left exact keys in it; make a new one"
        )


# ---- layers of transformers ----------------------------------------------------------------------


def storage_of(layer: Any) -> Any:
    """The layer of `transformers` that stores the states of `layer`."""
    return layer.storage if isinstance(layer, PrunedLayer) else layer


def is_quantized(layer: Any) -> bool:
    """Whether `layer` stores quantized states."""
    return isinstance(storage_of(layer), QuantizedLayer)


def emptied(storage: DynamicLayer) -> Any:
    """An empty layer that stores states as `storage` does."""
    empty: Any = copied(storage)
    empty.keys = empty.values = None
    empty.is_initialized = False
    if isinstance(storage, QuantizedLayer):
        empty.cumulative_length = 0
        empty._quantized_keys = empty._quantized_values = None
        empty._pending_beam_idx = None  # later releases than 5.2 reorder when they next update
    return empty


def filled(storage: DynamicLayer, keys: Tensor, values: Tensor) -> Any:
    """A layer that stores `keys` and `values` `(B, H_kv, n, d)` as `storage` does."""
    if isinstance(storage, QuantizedLayer):
        layer = emptied(storage)
        layer.update(keys, values)
        return layer
    layer = copied(storage)
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def states_of(layer: Any) -> tuple[Tensor, Tensor]:
    """Keys and values that `layer` holds, `(B, H_kv, n, d)` each, dequantized where need be."""
    storage = storage_of(layer)
    if not isinstance(storage, QuantizedLayer):
        return storage.keys, storage.values

    def whole(quantized: Any, recent: Tensor) -> Tensor:
        states = storage._dequantize(quantized)
        pending = getattr(storage, "_pending_beam_idx", None)
        if pending is not None:
            states = states.index_select(0, pending.to(states.device))
        return torch.cat((states, recent), dim=-2) if recent.numel() else states

    return (
        whole(storage._quantized_keys, storage.keys),
        whole(storage._quantized_values, storage.values),
    )


def n_to_remove(layer: Any, tokens: int) -> int:
    """How many tokens `crop(tokens)` asks to remove, as the installed transformers has it."""
    to_length = tokens > 0 or (tokens == 0 and _CROP_TAKES_LENGTH)
    return max(0, layer.get_seq_length() - tokens) if to_length else -tokens


def check_crop(layer: Any, remove: int) -> None:
    """Refuse to take more tokens off `layer` than came after its pruning.

    Raises:
        UnsupportedCacheError: with both numbers.
    """
    if remove > layer.n_recent:
        raise UnsupportedCacheError(
            f"cannot crop {remove} tokens off a pruned layer: {layer.n_recent} came after the "
            "pruning, what was evicted before them cannot come back"
        )


def _rows(x: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if x is None else x[rows.to(x.device)]


def _extended(positions: Tensor, recent: Tensor) -> Tensor:
    """`positions` `(B, H_kv, n)` and after them `recent`, the same for all heads."""
    batch, heads, _ = positions.shape
    return torch.cat((positions.long(), recent.expand(batch, heads, -1)), dim=-1)
