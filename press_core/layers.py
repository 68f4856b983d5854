"""Cache layers from which tokens were evicted.

What was evicted is known by the cache layer and by nothing else: a pruned layer carries the
positions of the tokens it keeps, so that lengths, positions and masks continue correctly.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from press_core.errors import ScopeError, UnsupportedCacheError

# transformers 5.2 crops to a length, later releases crop a number of tokens away.
_CROP_TAKES_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters

# Later releases than 5.2 reorder what is quantized when they next dequantize it.
_REORDERS_QUANTIZED = hasattr(QuantizedLayer, "_apply_pending_reorder")


@dataclass
class Journal:
    """What a scope that acts while decoding remembers of a layer since it pruned it last.

    Attributes:
        n_steps: forwards since then.
        states: by name, what is known of the last tokens: `(B, ..., b, channels)` each.
    """

    n_steps: int = 0
    states: dict[str, Tensor] = field(default_factory=dict)

    def note(self, limit: int, **states: Tensor | None) -> None:
        """Append the states of new tokens, and forget all but the last `limit` tokens."""
        self.n_steps += 1
        for name, new in states.items():
            if new is not None and limit:
                old = self.states.get(name)
                joined = new if old is None else torch.cat((old, new), dim=-2)
                self.states[name] = joined[..., -limit:, :]

    def select(self, rows: Tensor) -> None:
        """Follow the cache in what it does to its batch."""
        self.states = {name: x[rows.to(x.device)] for name, x in self.states.items()}


class Pruned:
    """What a cache layer becomes once tokens are evicted from it, whatever stores its states.

    It counts the tokens it has *seen* (`get_seq_length`), so that positions continue, and tells the
    mask builder which columns are still there (`get_mask_sizes`). Tokens that arrive later are
    appended as in the layer that it was.

    Attributes:
        positions: `(B, H_kv, n)` int32: position in the sequence of each slot of the pruned part,
            ascending; -1 marks an empty slot (rows of a padded batch keep different numbers of
            tokens, aligned on the right). None if the press that pruned did not say.
        evicted: tokens seen minus slots held.
        n_pruned: slots of the pruned part, those before the tokens that came later.
        padded: whether the batch was padded, so that the mask the model builds from the
            uncompressed sequence would hide the wrong keys.
        uneven: whether it holds another number of slots than the layer that the model builds the
            mask of all layers for.
        mean_padding: padding per row of what the layer has seen, on average.
        steps_masked: whether the attention implementation takes a mask for single tokens too.
        rotary_positions: `(B, H_kv, n)` int32: where the keys of the pruned part were turned to;
            None: where they had been. Later tokens continue from there, so that such a layer counts
            as seen what it then held.
        rotary_padding: `(B,)` int64: by how much the rows of a padded batch lag behind that count.
        forgotten: tokens no longer counted as seen.
        misplaced: whether the positions that the model counts do not continue from there.
        sinks: `(B, H_kv, n_sink, d)`: the first keys before RoPE, where they are turned again and
            again.
        sinks_known: `(B,)` bool: of which rows they are known.
        journals: by scope, what it remembers while decoding.
    """

    positions: Tensor | None = None
    evicted: int = 0
    n_pruned: int = 0
    padded: bool = False
    uneven: bool = False
    mean_padding: float = 0.0
    steps_masked: bool = False
    rotary_positions: Tensor | None = None
    rotary_padding: Tensor | None = None
    forgotten: int = 0
    misplaced: bool = False
    sinks: Tensor | None = None
    sinks_known: Tensor | None = None
    _served: bool = False
    device: torch.device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.journals: dict[int, Journal] = {}

    @property
    def n_slots(self) -> int:
        """Slots physically held per head."""
        return super().get_seq_length()  # type: ignore[misc]

    @property
    def n_recent(self) -> int:
        """Slots of the tokens that came after the pruning."""
        return self.n_slots - self.n_pruned

    def hold(
        self, keys: Tensor, values: Tensor, positions: Tensor | None, seen: int, padded: bool
    ) -> None:
        """Store `keys` and `values` `(B, H_kv, n, d)` as what is left of `seen` tokens."""
        self.reset()
        if isinstance(self, QuantizedLayer):
            super().update(keys, values)  # type: ignore[misc]
        else:
            self.lazy_initialization(keys, values)  # type: ignore[attr-defined]
            self.keys, self.values = keys, values
        self.positions = None if positions is None else positions.to(torch.int32)
        self.padded = padded
        self.n_pruned = int(keys.shape[-2])
        self.evicted = seen - self.n_pruned

    def occupied(self) -> Tensor:
        """`(B, n)` bool: which slots of the pruned part hold a token."""
        if self.positions is None:  # the press did not say, so rows are of one length
            shape = self.keys.shape[0], self.n_pruned
            return torch.ones(shape, dtype=torch.bool, device=self.device)
        return self.positions[:, 0] >= 0

    def all_positions(self) -> Tensor | None:
        """Position in the sequence of every slot, `(1 or B, 1 or H_kv, n_slots)`, or None."""
        start = self.evicted + self.n_pruned + self.forgotten
        recent = torch.arange(start, start + self.n_recent, device=self.device)
        if self.n_pruned == 0:
            return recent.view(1, 1, -1)
        return None if self.positions is None else _extended(self.positions, recent)

    def all_rotary_positions(self) -> Tensor | None:
        """Rotary position of every slot where keys were turned, `(B, H_kv, n_slots)`; else None."""
        if self.rotary_positions is None:
            return None
        start = self.evicted + self.n_pruned
        recent = torch.arange(start, start + self.n_recent, device=self.device)
        if self.rotary_padding is not None:
            recent = recent - self.rotary_padding.view(-1, 1, 1)
        return _extended(self.rotary_positions, recent)

    def serve(self) -> None:
        """Told by an open scope that the next update comes with all the help it needs."""
        self._served = True

    @property
    def is_served(self) -> bool:
        return self._served

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        needs_mask = self.padded or (self.uneven and (key_states.shape[2] > 1 or self.steps_masked))
        if (needs_mask or self.misplaced) and not self._served:
            raise ScopeError(
                "this cache holds rows or layers of different lengths, which the model's own "
                "attention mask does not fit, or other positions than it counts with; keep the "
                "scope of the press open while decoding: `with press(model): model.generate(...)`"
            )
        self._served = False
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]

    def get_seq_length(self) -> int:
        return self.n_slots + self.evicted

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        if isinstance(query_length, Tensor):
            # transformers 5.2 passes cache_position, by which it will compare queries with keys:
            # in a model with sliding layers it does not follow keys that were turned.
            return self.n_slots + len(query_length), int(query_length[0]) - self.n_slots
        return self.n_slots + query_length, self.evicted

    def crop(self, tokens: int) -> None:
        """Take the most recent tokens away again, down to where the layer was pruned.

        Args:
            tokens: as the installed transformers has it: minus the number of tokens to remove, or
                (5.2 also) the length to crop to.

        Raises:
            UnsupportedCacheError: if that would reach into the pruned part.
        """
        remove = n_to_remove(self, tokens)
        if remove and isinstance(self, QuantizedLayer):
            raise UnsupportedCacheError("a quantized layer cannot give back its latest tokens")
        check_crop(self, remove)
        if remove:
            self.keys, self.values = self.keys[..., :-remove, :], self.values[..., :-remove, :]

    def reset(self) -> None:
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False
        if isinstance(self, QuantizedLayer):
            self.cumulative_length = 0
            self._quantized_keys = self._quantized_values = None
            self._pending_beam_idx = None  # later releases than 5.2 reorder when they next update
        for name, default in _DEFAULTS.items():
            setattr(self, name, default)
        self.journals = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if not _REORDERS_QUANTIZED:
            self._refuse_rows_of_quantized()
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._refuse_rows_of_quantized()
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse_rows_of_quantized()
        batch = self.keys.shape[0] if self.n_slots else 0
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._select_rows(torch.arange(batch).repeat_interleave(repeats))

    def _refuse_rows_of_quantized(self) -> None:
        # transformers would select those of the tokens that wait to be quantized, and no others.
        if isinstance(self, QuantizedLayer):
            raise UnsupportedCacheError(
                "rows of a quantized layer cannot be selected or repeated, nor its beams reordered "
                "by transformers 5.2; use a DynamicCache, or a newer transformers for beam search"
            )

    def _select_rows(self, rows: Tensor) -> None:
        for name in ("positions", "rotary_positions", "rotary_padding", "sinks", "sinks_known"):
            per_row = getattr(self, name)
            if per_row is not None:
                setattr(self, name, per_row[rows.to(per_row.device)])
        for journal in self.journals.values():
            journal.select(rows)


_DEFAULTS = {n: getattr(Pruned, n) for n in Pruned.__annotations__ if hasattr(Pruned, n)}


def _extended(positions: Tensor, recent: Tensor) -> Tensor:
    """`positions` `(B, H_kv, n)` and after them `recent`, the same for all heads."""
    batch, heads, _ = positions.shape
    return torch.cat((positions.long(), recent.expand(batch, heads, -1)), dim=-1)


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


class PrunedLayer(Pruned, DynamicLayer):
    """A `DynamicLayer` some of whose tokens were evicted."""


class ChannelLayer(PrunedLayer):
    """A pruned layer that stores some channels of its keys only, and all of those that come later.

    Attributes:
        keys: `(B, H_kv, n, d')`, of the pruned part.
        channels: `(B, H_kv, d')` int64, which channels those are.
        recent_keys: `(B, H_kv, m, d)`, of the tokens that came later.
        values: `(B, H_kv, n + m, d)`.
    """

    channels: Tensor
    recent_keys: Tensor
    _attended: bool = False

    def cut(self, channels: Tensor, head_dim: int) -> None:
        """Told which channels the keys that it holds have left of `head_dim`."""
        self.channels = channels
        self.recent_keys = self.keys.new_empty(*self.keys.shape[:2], 0, head_dim)

    @property
    def n_slots(self) -> int:
        return int(self.values.shape[-2]) if self.is_initialized else 0

    def serve_channels(self) -> None:
        """Told by an open scope that the attention function will attend over this layer itself."""
        self._attended = True

    def unserve_channels(self) -> None:
        """Told that it will not after all, or has."""
        self._attended = self._served = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:  # reset
            raise ScopeError("this cache was reset while it had lost channels; make a new one")
        if not self._attended:
            raise ScopeError(
                "this cache stores some channels of its keys only, which the model's own attention "
                "cannot read; decode inside the scope of the press, or inside "
                "`with attention_patch.headwise(model): ...`"
            )
        self._attended = self._served = False
        self.recent_keys = torch.cat((self.recent_keys, key_states), dim=-2)
        self.values = torch.cat((self.values, value_states), dim=-2)
        return key_states, value_states

    def crop(self, tokens: int) -> None:
        keys, remove = self.keys, n_to_remove(self, tokens)
        super().crop(tokens)
        self.keys = keys
        if remove:
            self.recent_keys = self.recent_keys[..., :-remove, :]

    def reset(self) -> None:
        super().reset()
        self.channels = self.recent_keys = None  # type: ignore[assignment]

    def _select_rows(self, rows: Tensor) -> None:
        super()._select_rows(rows)
        if not self.is_initialized:
            return
        rows = rows.to(self.channels.device)
        self.channels, self.recent_keys = self.channels[rows], self.recent_keys[rows]

    def offload(self) -> None:
        raise UnsupportedCacheError(
            "a cache with some channels of its keys cannot be offloaded: attention reads it in "
            "place; use a DynamicCache without offloading"
        )


@cache
def _pruned_class(kind: Any) -> Any:
    if kind is DynamicLayer:
        return PrunedLayer
    return kind if issubclass(kind, Pruned) else type(f"Pruned{kind.__name__}", (Pruned, kind), {})


def pruned_like(layer: DynamicLayer) -> Any:
    """An empty layer that tokens may be evicted from and that stores states as `layer` does."""
    pruned = adopted(layer)
    pruned.reset()
    return pruned


def adopted(layer: DynamicLayer) -> Any:
    """`layer` with all that it holds, as one that tokens may be evicted from."""
    kind = _pruned_class(type(layer))  # type: ignore[arg-type]
    pruned: Any = object.__new__(kind)
    pruned.__dict__.update(layer.__dict__)
    pruned.__dict__.setdefault("journals", {})
    return pruned


class ExactLayer(DynamicLayer):
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


def is_quantized(layer: Any) -> bool:
    """Whether `layer` stores quantized states."""
    return isinstance(layer, QuantizedLayer)


def states_of(layer: Any) -> tuple[Tensor, Tensor]:
    """Keys and values that `layer` holds, `(B, H_kv, n, d)` each, dequantized where need be."""
    if not isinstance(layer, QuantizedLayer):
        return layer.keys, layer.values

    def whole(quantized: Any, recent: Tensor) -> Tensor:
        states = layer._dequantize(quantized)
        pending = getattr(layer, "_pending_beam_idx", None)
        if pending is not None:
            states = states.index_select(0, pending.to(states.device))
        return torch.cat((states, recent), dim=-2) if recent.numel() else states

    return (
        whole(layer._quantized_keys, layer.keys),
        whole(layer._quantized_values, layer.values),
    )
