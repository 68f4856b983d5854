"""Layers of a cache as records, and layers made from records: what `saving` writes and reads.

A record is made of mappings with plain values and tensors, and of nothing else. It says what a
layer *is*: how a scope helps with reading it, and what a scope remembers of it, is not in there. A
record that comes from a file is checked before anything is made of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from press_core.cache.pruned import (
    ChannelPrunedLayer,
    KeptTokens,
    PrefillStagingLayer,
    PrunedLayer,
    Rerotation,
    Sinks,
    is_quantized,
    pruned_layer,
)
from press_core.cache.ragged import RaggedLayer
from press_core.errors import PressError, UnsupportedCacheError

MOST = 2**40
"""No count in a record is larger: more tokens than any cache has seen."""

Record = dict[str, Any]
_IN_PLACE = (RaggedLayer, ChannelPrunedLayer)
"""Layers that attention reads where they lie; once reset they take no tokens."""


class CacheFileError(PressError, ValueError):
    """A file is no compressed cache, or not one for this model."""


# ---- layers to records ---------------------------------------------------------------------------


def record_of(layer: Any) -> Record:
    """All that a layer holds; tensors in it are the layer's own.

    Raises:
        UnsupportedCacheError: if it holds what cannot be kept.
    """
    _check_keepable(layer)
    if isinstance(layer, RaggedLayer):
        return {"kind": "ragged", **_ragged_record(layer)}
    if isinstance(layer, PrunedLayer) and not layer.is_initialized:
        return record_of(layer.storage)  # it was reset, and knows nothing
    if not isinstance(layer, PrunedLayer):
        return {"kind": type(layer).__name__, "state": _state_of(layer)}
    record: Record = {"kind": "pruned", "storage": record_of(layer.storage), **_pruned_parts(layer)}
    if isinstance(layer, ChannelPrunedLayer):
        channels = {"channels": layer.channels, "recent_keys": layer.recent_keys}
        record |= {"kind": "channels", **channels}
    return record


def _check_keepable(layer: Any) -> None:
    kind, torn = type(layer).__name__, getattr(layer, "is_torn", False)
    memories = getattr(layer, "memories", {}).values()
    if is_quantized(layer) or hasattr(layer, "_quantized_keys"):
        why = "its codes are in a format of the library that made them; use a DynamicCache"
    elif isinstance(layer, PrefillStagingLayer) or any(m.is_prefill for m in memories):
        why = "its prefill is under way; save it once that is complete"
    elif torn or (isinstance(layer, _IN_PLACE) and not layer.is_initialized):
        why = "it was abandoned in the middle of a forward, or reset; make a new one"
    else:
        return
    raise UnsupportedCacheError(f"cannot save a {kind}: {why}")


def _state_of(layer: Any) -> Record:
    """The attributes of a layer of `transformers`.

    Raises:
        UnsupportedCacheError: if one of them is neither plain nor a tensor.
    """
    state = {
        name: value
        for name, value in vars(layer).items()
        if not isinstance(value, torch.device)  # follows from where it is put
    }
    for name, value in state.items():
        if not _is_plain(value):
            raise UnsupportedCacheError(
                f"cannot save a {type(layer).__name__}: its {name} is a {type(value).__name__}, "
                "and only numbers, words and tensors are kept"
            )
    return state


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(k) in (int, str) and _is_plain(x) for k, x in value.items())
    return value is None or type(value) in (bool, int, float, str, torch.dtype, Tensor)


def _pruned_parts(layer: PrunedLayer) -> Record:
    kept, rerotation, sinks = layer.kept, layer.rerotation, layer.sinks
    return {
        "kept": {
            "positions": kept.positions,
            "n_slots": kept.n_slots,
            "n_seen": kept.n_seen,
            "padded": bool(kept.padded),
            "padding": kept.padding,
            "rotary_positions": kept.rotary_positions,
        },
        "rerotation": rerotation
        and {
            "positions": rerotation.positions,
            "shift": int(rerotation.shift),
            "row_lag": rerotation.row_lag,
        },
        "sinks": sinks and {"keys": sinks.keys, "known": sinks.known},
    }


def _ragged_record(layer: RaggedLayer) -> Record:
    keys, values, slots = layer.packed()
    recent_keys, recent_values = layer.recent
    return {
        "keys": keys,
        "values": values,
        "slots": slots,
        "held": torch.tensor(layer.held),
        "recent_keys": recent_keys,
        "recent_values": recent_values,
        "room": layer.recent_keys.shape[1],
        "n_heads": layer.n_heads,
        "seen": layer.seen,
        "mean_padding": float(layer.mean_padding),
        "remembered": layer.remembered,
        "remembered_until": layer.remembered_until,
    }


# ---- records to layers ---------------------------------------------------------------------------


def layer_from(record: Any, template: Any, device: torch.device) -> Any:
    """The layer that a record describes, with tensors of its own on `device`.

    Args:
        template: the empty layer that a cache made for the model has in this place, or None.

    Raises:
        CacheFileError: if the record describes none.
    """
    fields = Fields(record, "a layer")
    kind = fields.text("kind")
    if kind == "ragged":
        return _ragged_layer(fields, device)
    if kind in ("pruned", "channels"):
        return _pruned_layer(fields, kind, template, device)
    return _plain_layer(fields, kind, template, device)


def _plain_layer(
    fields: Fields, kind: str, template: Any, device: torch.device, fewer_keys: bool = False
) -> Any:
    state = fields.mapping("state")
    fields.done()
    layer: Any
    if template is not None and type(template).__name__ == kind:
        layer = template
    elif kind == "DynamicLayer":
        layer = DynamicLayer()
    elif kind == "DynamicSlidingWindowLayer":  # of a cache that was made without a configuration
        layer = DynamicSlidingWindowLayer(Fields(state, kind).number("sliding_window", 1))
    else:
        expected = "" if template is None else f", where this model has a {type(template).__name__}"
        raise CacheFileError(f"it has a layer of an unknown kind {kind!r:.60}{expected}")
    _check_attributes(layer, state)
    for name, value in state.items():
        setattr(layer, name, _placed(value, device))
        if name.endswith("dtype") and value is not None:
            setattr(layer, name.removesuffix("dtype") + "device", device)
    if isinstance(layer, DynamicLayer):
        _check_stored(layer, fewer_keys)
    return layer


def _check_attributes(empty: Any, state: Mapping[Any, Any]) -> None:
    """Refuse attributes that a layer like `empty` does not have, or not of that type."""
    kind, known = type(empty), vars(empty)
    settings = [n for n in inspect.signature(kind.__init__).parameters if n in known]
    for name, value in state.items():
        new = name not in known and isinstance(name, str) and not hasattr(kind, name)
        lazy = new and isinstance(value, torch.dtype)  # set when the first tokens come
        fits = lazy or (name in known and _is_like(known[name], value))
        if not fits or (name in settings and value != known[name]):
            raise CacheFileError(
                f"a {kind.__name__} of this model has no {name!s:.60} such as {value!r:.60}"
            )


def _is_like(empty: Any, value: Any) -> bool:
    """Whether an attribute that is `empty` in a new layer may become `value`."""
    if empty is None:
        return value is None or isinstance(value, (Tensor, torch.dtype)) or _is_count(value)
    if isinstance(empty, dict):
        same = isinstance(value, dict) and value.keys() == empty.keys()
        return same and all(_is_like(empty[key], value[key]) for key in empty)
    if type(empty) is int:
        return _is_count(value)
    return type(value) is type(empty)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: _placed(x, device) for key, x in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def _check_stored(layer: Any, fewer_keys: bool = False) -> None:
    """Refuse keys and values that do not fit each other.

    Args:
        fewer_keys: whether the last tokens' keys lie elsewhere.
    """
    keys, values = layer.keys, layer.values
    if keys is None and values is None and not layer.is_initialized:
        return
    fits = isinstance(keys, Tensor) and isinstance(values, Tensor) and layer.is_initialized
    fits = fits and isinstance(getattr(layer, "dtype", None), torch.dtype)
    if fits and keys.numel() == values.numel() == 0 and keys.dim() == values.dim() == 1:
        return  # has a type, and no tokens yet
    seen = getattr(layer, "cumulative_length", MOST)
    fits = fits and keys.dim() == values.dim() == 4 and keys.shape[:2] == values.shape[:2]
    fits = fits and keys.is_floating_point() and values.is_floating_point()
    n_keys, n_values = (keys.shape[2], values.shape[2]) if fits else (0, 0)
    if not 0 < n_keys <= n_values <= seen or (n_keys < n_values and not fewer_keys):
        raise CacheFileError(f"keys and values of a {type(layer).__name__} do not fit each other")


def _pruned_layer(fields: Fields, kind: str, template: Any, device: torch.device) -> PrunedLayer:
    has_channels = kind == "channels"
    storage = _storage(fields.mapping("storage"), template, device, has_channels)
    batch, heads, n_stored = storage.values.shape[:3]
    kept = Fields(fields.mapping("kept"), "what a layer has kept")
    n_slots, n_seen = kept.number("n_slots", at_most=n_stored), kept.number("n_seen")
    if n_seen < n_slots:
        raise CacheFileError(f"a layer has kept {n_slots} of {n_seen} tokens")
    per_slot = (batch, heads, n_slots)
    layer: PrunedLayer
    if has_channels:
        layer = _channel_layer(fields, storage, n_slots, device)
    else:
        layer = pruned_layer(storage)
    layer.kept = KeptTokens(
        kept.integers("positions", per_slot, torch.int32, device, -1, n_seen),
        n_slots,
        n_seen,
        kept.flag("padded"),
        kept.integers("padding", (batch,), torch.int64, torch.device("cpu"), 0, n_seen + 1),
        kept.integers("rotary_positions", per_slot, torch.int32, device),
    )
    kept.done()
    if layer.kept.padded and layer.kept.positions is None:
        raise CacheFileError("rows of a padded batch do not say which tokens they keep")
    layer.rerotation = _rerotation(fields.get("rerotation"), per_slot, n_seen, device)
    layer.sinks = _sinks(fields.get("sinks"), storage, device)
    fields.done()
    return layer


def _storage(record: Any, template: Any, device: torch.device, fewer_keys: bool) -> Any:
    fields = Fields(record, "a layer")
    storage = _plain_layer(fields, fields.text("kind"), template, device, fewer_keys)
    grows = isinstance(storage, DynamicLayer) and not storage.is_sliding
    if not grows or not isinstance(storage.values, Tensor) or storage.values.dim() != 4:
        raise CacheFileError(f"a {type(storage).__name__} without tokens was pruned")
    return storage


def _channel_layer(
    fields: Fields, storage: Any, n_slots: int, device: torch.device
) -> ChannelPrunedLayer:
    batch, heads, n_stored, _ = storage.values.shape
    recent = fields.states("recent_keys", (batch, heads, n_stored - n_slots, None), device)
    width = (batch, heads, storage.keys.shape[-1])
    channels = fields.integers("channels", width, torch.int64, device, 0, recent.shape[-1])
    if channels is None or storage.keys.shape[2] != n_slots or recent.dtype != storage.keys.dtype:
        raise CacheFileError("it does not say which channels of the keys are left")
    layer = ChannelPrunedLayer(storage, channels, recent.shape[-1])
    layer.recent_keys = recent
    return layer


def _rerotation(
    record: Any, per_slot: tuple[int, ...], n_seen: int, device: torch.device
) -> Rerotation | None:
    if record is None:
        return None
    fields = Fields(record, "where keys were rotated to")
    positions = fields.integers("positions", per_slot, torch.int32, device)
    shift = fields.number("shift", at_most=n_seen)
    row_lag = fields.integers("row_lag", per_slot[:1], torch.int64, device)
    fields.done()
    if positions is None:
        raise CacheFileError("it does not say where keys were rotated to")
    return Rerotation(positions, shift, row_lag)


def _sinks(record: Any, storage: Any, device: torch.device) -> Sinks | None:
    if record is None:
        return None
    batch, heads, _, dim = storage.keys.shape
    fields = Fields(record, "the first keys of each row")
    keys = fields.states("keys", (batch, heads, None, dim), device)
    known = fields.flags("known", (batch,), device)
    fields.done()
    return Sinks(keys, known)


def _ragged_layer(fields: Fields, device: torch.device) -> RaggedLayer:
    held = fields.integers("held", (None,), torch.int64, torch.device("cpu"), 0, MOST)
    n_heads = fields.number("n_heads", 1)
    if held is None or not len(held) or len(held) % n_heads:
        raise CacheFileError("it does not say how many tokens each head holds")
    n_tokens = int(held.sum()) if int(held.max()) * len(held) < MOST else -1
    keys = fields.states("keys", (n_tokens, None), device)
    values = fields.states("values", (n_tokens, None), device)
    recent_keys = fields.states("recent_keys", (len(held), None, keys.shape[-1]), device)
    n_recent, seen = recent_keys.shape[1], fields.number("seen")
    recent = (len(held), n_recent, values.shape[-1])
    recent_values = fields.states("recent_values", recent, device)
    slots = fields.integers("slots", (n_tokens,), torch.int32, device, 0, seen)
    same = keys.dtype == values.dtype
    if slots is None or not same or not int(held.max()) + n_recent <= seen:
        raise CacheFileError("heads of different lengths hold other tokens than a layer has seen")
    mean_padding = fields.share("mean_padding", seen)
    remembered = fields.get("remembered")
    until = fields.number("remembered_until", at_most=seen)
    room = fields.number("room")
    if remembered is not None:
        rows = len(held) // n_heads
        remembered = fields.states("remembered", (rows, n_heads, None), device)
    fields.done()
    layer = RaggedLayer.of_packed(keys, values, slots, held.tolist(), n_heads, seen)
    # What is only room is made again, unless a file asks for much more of it than it holds.
    room = room if room <= 2 * (n_recent + n_tokens // len(held)) else n_recent
    layer.hold_recent(recent_keys, recent_values, room)
    layer.mean_padding = mean_padding
    layer.remember(remembered, until)
    return layer


# ---- fields of a record --------------------------------------------------------------------------


class Fields:
    """The fields of a record from a file, each checked when it is taken."""

    def __init__(self, record: Any, what: str) -> None:
        if not isinstance(record, dict):
            raise CacheFileError(f"{what} is {record!r:.60}")
        self.record, self.what = record, what
        self.taken: set[Any] = set()

    def get(self, name: str) -> Any:
        """Whatever it is."""
        if name not in self.record:
            raise CacheFileError(f"{self.what} has no {name}")
        self.taken.add(name)
        return self.record[name]

    def wrong(self, name: str) -> CacheFileError:
        value = self.record[name]
        if isinstance(value, Tensor):
            value = f"a tensor {tuple(value.shape)} of {value.dtype}"
        return CacheFileError(f"{self.what} has {name} {value!s:.80}")

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise self.wrong(name)
        return value

    def mapping(self, name: str) -> dict[Any, Any]:
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name)
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.wrong(name)
        return value

    def number(self, name: str, at_least: int = 0, at_most: int = MOST) -> int:
        """An int within limits."""
        value = self.get(name)
        if type(value) is not int or not at_least <= value <= at_most:
            raise self.wrong(name)
        return value

    def share(self, name: str, at_most: int) -> float:
        """A finite float within [0, at_most]."""
        value = self.get(name)
        if type(value) is not float or not math.isfinite(value) or not 0 <= value <= at_most:
            raise self.wrong(name)
        return value

    def tensor(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        """A tensor of some shape; None in it stands for any size."""
        value = self.get(name)
        fits = isinstance(value, Tensor) and value.dim() == len(shape)
        if not fits or any(n not in (None, m) for n, m in zip(shape, value.shape, strict=True)):
            raise self.wrong(name)
        return value

    def states(self, name: str, shape: tuple[int | None, ...], device: torch.device) -> Tensor:
        """A tensor of numbers."""
        value = self.tensor(name, shape)
        if not value.is_floating_point():
            raise self.wrong(name)
        return value.to(device)

    def flags(self, name: str, shape: tuple[int | None, ...], device: torch.device) -> Tensor:
        """A tensor of bools."""
        value = self.tensor(name, shape)
        if value.dtype != torch.bool:
            raise self.wrong(name)
        return value.to(device)

    def integers(
        self,
        name: str,
        shape: tuple[int | None, ...],
        dtype: torch.dtype,
        device: torch.device,
        at_least: int | None = None,
        below: int | None = None,
    ) -> Tensor | None:
        """A tensor of one type of ints within limits, or None."""
        if self.get(name) is None:
            return None
        value = self.tensor(name, shape)
        fits = value.dtype == dtype
        if fits and value.numel() and at_least is not None and below is not None:
            fits = at_least <= int(value.min()) and int(value.max()) < below
        if not fits:
            raise self.wrong(name)
        return value.to(device)

    def done(self) -> None:
        """Refuse fields that nobody has asked for."""
        unknown = sorted(map(str, set(self.record) - self.taken))
        if unknown:
            raise CacheFileError(f"{self.what} has an unknown {unknown[0]:.60}")
