"""Layers of a cache as records, and layers made from records: what a file of a cache holds.

A record is made of mappings with plain values and tensors, and of nothing else. It says what a
layer *is*: how a scope helps with reading it, and what a scope remembers of it, is not in there.
What comes from a file is checked before anybody sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from press_core.cache.channels import ChannelPrunedLayer
from press_core.cache.pruned import PrunedLayer, pruned_layer
from press_core.cache.ragged import RaggedLayer
from press_core.cache.recent import Recent
from press_core.cache.storage import HybridStorage, Storage, kind_of
from press_core.cache.tokens import Kept, Rerotation
from press_core.errors import UnsupportedCacheError
from press_core.files.tensors import named_sizes, require

MOST = 2**40
"""No count in a record is larger: more tokens than any cache has seen."""

Record = dict[str, Any]


# ---- layers to records ---------------------------------------------------------------------------


def record_of(layer: Any) -> Record:
    """All that a layer holds; tensors in it are the layer's own.

    Raises:
        UnsupportedCacheError: if it holds what cannot be kept.
    """
    if not isinstance(layer, PrunedLayer):
        return {"kind": type(layer).__name__, "state": _state_of(layer)}
    torn = layer.is_unusable or any(memory.in_prefill for memory in layer.memories.values())
    if torn or (not layer.is_initialized and type(layer) in (RaggedLayer, ChannelPrunedLayer)):
        raise UnsupportedCacheError(
            f"cannot save a {type(layer).__name__} that was abandoned in the middle of a forward, "
            "reset, or whose prefill is under way; save caches at rest"
        )
    known: Record = {"kept": vars(layer.kept), "carried": dict(layer.carried)}
    if isinstance(layer, RaggedLayer):
        return {"kind": "ragged", **known, **_ragged_state(layer)}
    if not layer.is_initialized:
        return record_of(layer.storage.layer)  # it was reset, and knows nothing
    known["rerotation"] = layer.rerotation and vars(layer.rerotation)
    known["storage"] = record_of(layer.storage.layer)
    if isinstance(layer, ChannelPrunedLayer):
        channels = {"channels": layer.channels, "recent_keys": layer.recent_keys}
        return {"kind": "channels", **known, **channels}
    return {"kind": "pruned", **known}


def _ragged_state(layer: RaggedLayer) -> Record:
    keys, values, positions = layer.packed()
    recent_keys, recent_values = (x[:, : layer.n_recent] for x in layer.recent.states())
    return {
        "keys": keys,
        "values": values,
        "positions": positions,
        "held": tuple(layer.held),
        "n_heads": layer.n_heads,
        "recent_keys": recent_keys,
        "recent_values": recent_values,
        "carried_until": layer.carried_until,
    }


def _state_of(layer: Any) -> Record:
    """The attributes of a layer of `transformers`."""
    if kind_of(layer) not in (None, Storage, HybridStorage):
        raise UnsupportedCacheError(
            f"cannot save a {type(layer).__name__}, whose states lie in a buffer or in the format "
            "of a library; use a DynamicCache"
        )
    # Devices follow from where a layer is put.
    state = {n: x for n, x in vars(layer).items() if not isinstance(x, torch.device)}
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


# ---- records to layers ---------------------------------------------------------------------------

_DIMS = {
    "state.keys": "rows heads old d",
    "state.values": "rows heads old v",
    "storage.state.keys": "rows heads old some",
    "storage.state.values": "rows heads all v",
    "kept.positions": "rows heads slots",
    "kept.rotary": "rows heads slots",
    "kept.real": "rows seen",
    "rerotation.positions": "rows heads slots",
    "channels": "rows heads some",
    "recent_keys": "rows heads recent d",
}
_RAGGED_DIMS = {
    **_DIMS,
    "keys": "tokens d",
    "values": "tokens v",
    "positions": "tokens",
    "recent_keys": "of_all recent d",
    "recent_values": "of_all recent v",
}
"""The dimensions of the tensors of a record; each name stands for one size."""


def layer_from(record: Any, template: Any, device: torch.device) -> Any:
    """The layer that a record describes, with tensors of its own on `device`.

    Args:
        template: the empty layer that a cache made for the model has in this place, or None.

    Raises:
        ValueError: or another of `UNREADABLE`, if the record describes none.
    """
    record = _placed(record, device)
    if record["kind"] == "ragged":
        return _ragged_layer(record)
    sizes = _sizes(record, _DIMS)
    if record["kind"] in ("pruned", "channels"):
        return _pruned_layer(record, _plain_layer(record["storage"], template, device), sizes)
    return _plain_layer(record, template, device)


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: _placed(x, device) for key, x in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def _sizes(record: Record, dims: dict[str, str]) -> dict[str, int]:
    """The sizes of the dimensions of all tensors in a record, by name."""
    tensors = {n: x for n, x in _flat(record) if n in dims and (x.dim() > 1 or x.numel())}
    sizes = named_sizes(tensors, dims)
    states = [x for name, x in tensors.items() if name.endswith(("keys", "values"))]
    floats = all(x.is_floating_point() and x.dtype == states[0].dtype for x in states)
    require(floats, "its keys and values are of different kinds")
    return sizes


def _flat(record: Record, before: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a record by their path."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, Tensor):
            yield f"{before}{name}", value


def _plain_layer(record: Record, template: Any, device: torch.device) -> Any:
    kind, state = record["kind"], record["state"]
    if template is not None and type(template).__name__ == kind:
        layer: Any = template
    elif kind == "DynamicLayer":
        layer = DynamicLayer()
    else:
        require(kind == "DynamicSlidingWindowLayer", f"it has a layer of an unknown kind {kind!r}")
        layer = DynamicSlidingWindowLayer(state["sliding_window"])
    empty = dict(vars(layer))
    for name, value in state.items():
        lazy = isinstance(value, torch.dtype) and not hasattr(type(layer), name)
        fits = lazy or (name in empty and _is_like(empty[name], value))
        require(fits, f"a {kind} of this model has no {name!s:.60} such as {value!r:.60}")
        setattr(layer, name, value)
        if name.endswith("dtype") and value is not None:
            setattr(layer, name.removesuffix("dtype") + "device", device)
    return layer


def _is_like(empty: Any, value: Any) -> bool:
    """Whether an attribute that is `empty` in a new layer may become `value`."""
    if isinstance(empty, dict):
        same = isinstance(value, dict) and value.keys() == empty.keys()
        return same and all(_is_like(empty[key], value[key]) for key in empty)
    if type(empty) is int:  # a count, or a size that the model gives
        return value == empty or (empty == 0 and _is_count(value))
    if empty is None:
        return value is None or isinstance(value, (Tensor, torch.dtype)) or _is_count(value)
    return type(value) is type(empty)


def _is_count(value: Any, most: int = MOST) -> bool:
    return type(value) is int and 0 <= value <= most


def _require_below(limit: int, index: Tensor | None) -> None:
    """Require an `index` of whole numbers less than `limit`, or -1."""
    if index is not None:
        fits = index.dtype in (torch.int32, torch.int64)
        fits = fits and (
            not index.numel() or index.is_meta or bool(((index >= -1) & (index < limit)).all())
        )
        require(fits, f"it holds positions beyond {limit}")


def _kept(record: Record, sizes: dict[str, int]) -> Kept:
    kept = Kept(**record["kept"])
    n_slots, n_seen, rows = kept.n_slots, kept.n_seen, kept.rows
    fits = _is_count(n_seen) and _is_count(n_slots, n_seen)
    fits = fits and sizes.get("slots", n_slots) == n_slots and sizes.get("seen", n_seen) == n_seen
    fits = fits and (rows is None or (kept.positions is not None and len(rows) == sizes["rows"]))
    fits = fits and (kept.real is None or kept.real.dtype == torch.bool)
    require(fits, "it has kept other tokens than it has seen")
    _require_below(n_seen, kept.positions)
    return kept


def _pruned_layer(record: Record, stored: Any, sizes: dict[str, int]) -> PrunedLayer:
    kind, kept = kind_of(stored), _kept(record, sizes)
    require(kind in (Storage, HybridStorage) and stored.is_initialized, "nothing was pruned")
    assert kind is not None
    if record["kind"] == "channels":
        channels = record["channels"]
        _require_below(sizes["d"], channels)
        layer: PrunedLayer = ChannelPrunedLayer(kind(stored), channels, sizes["d"])
        layer.recent_keys = record["recent_keys"]
    else:
        layer = pruned_layer(kind(stored))
    same = sizes["old"] + sizes.get("recent", 0) == sizes["all"]
    require(same and kept.n_slots <= layer.n_slots, "keys and values differ in number")
    layer.kept, layer.carried = kept, record["carried"]
    if record["rerotation"] is not None:
        layer.rerotation = Rerotation(**record["rerotation"])
        require(_is_count(layer.rerotation.shift, kept.n_seen), "it counts more than it has seen")
    return layer


def _ragged_layer(record: Record) -> RaggedLayer:
    carried, until = record["carried"], record["carried_until"]
    dims = dict.fromkeys((f"carried.{name}" for name in carried), "rows heads carried")
    sizes = _sizes(record, _RAGGED_DIMS | dims)
    held, n_heads, positions = list(record["held"]), record["n_heads"], record["positions"]
    n_rows = sizes.setdefault("rows", len(held) // n_heads)
    kept = _kept(record, sizes)
    _require_below(kept.n_seen, positions)
    fits = all(_is_count(n, kept.n_seen) for n in held) and sum(held) == sizes["tokens"]
    fits = fits and _is_count(n_heads) and sizes.get("heads", n_heads) == n_heads
    fits = fits and len(held) == sizes["of_all"] == n_rows * n_heads
    require(fits, "its heads hold other tokens")
    layer = RaggedLayer(kept, n_heads, Recent(record["recent_keys"], record["recent_values"]))
    chosen = torch.arange(len(positions), device=positions.device)
    layer.lay_out(record["keys"], record["values"], positions.to(torch.int32), chosen, held)
    layer.carried, layer.carried_until = carried, until
    require(_is_count(until, layer.n_seen), "it was judged otherwise")
    return layer
