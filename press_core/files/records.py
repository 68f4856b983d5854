"""Layers of a cache as records, and layers made from records: what a file of a cache holds.

A record is made of mappings with plain values and tensors, and of nothing else. It says what a
layer *is*: how a scope helps with reading it, and what a scope remembers of it, is not in there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from press_core.cache.channels import ChannelPrunedLayer
from press_core.cache.kinds import PrunedHybridLayer, kind_of
from press_core.cache.pruned import PrunedLayer
from press_core.cache.ragged import RaggedLayer
from press_core.cache.recent import Recent
from press_core.cache.tokens import Kept, Rerotation
from press_core.errors import UnsupportedCacheError
from press_core.files.files import require

Record = dict[str, Any]

MOST = 2**24
"""Tokens that a cache may have seen: what is made of them has to stay small."""


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
        return record_of(layer.inner)  # it was reset, and knows nothing
    known["rerotation"] = layer.rerotation and vars(layer.rerotation)
    known["storage"] = record_of(layer.inner)
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
    if kind_of(layer) not in (None, PrunedLayer, PrunedHybridLayer):
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


def layer_from(record: Any, template: Any, device: torch.device) -> Any:
    """The layer that a record describes, with tensors of its own on `device`.

    Args:
        template: the empty layer that a cache made for the model has in this place, or None.

    Raises:
        ValueError: or another of `UNREADABLE`, if the installed release knows no such layer.
    """
    record = _placed(record, device)
    if record["kind"] == "ragged":
        return _ragged_layer(record)
    if record["kind"] in ("pruned", "channels"):
        return _pruned_layer(record, _plain_layer(record["storage"], template, device))
    return _plain_layer(record, template, device)


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: _placed(x, device) for key, x in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def _plain_layer(record: Record, template: Any, device: torch.device) -> Any:
    kind, state = record["kind"], record["state"]
    if template is not None and type(template).__name__ == kind:
        layer: Any = template
    elif kind == "DynamicLayer":
        layer = DynamicLayer()
    else:
        require(kind == "DynamicSlidingWindowLayer", f"it has a layer of an unknown kind {kind!r}")
        layer = DynamicSlidingWindowLayer(state["sliding_window"])
    known = set(vars(layer))
    for name, value in state.items():
        fits = name in known or isinstance(value, torch.dtype)
        require(fits, f"a {kind} of this release has no {name}")
        setattr(layer, name, value)
        if name.endswith("dtype") and value is not None:
            setattr(layer, name.removesuffix("dtype") + "device", device)
    return layer


def _kept(record: Record, positions: Tensor | None) -> Kept:
    """What a layer has kept: in bounds, whoever has sealed it."""
    kept = Kept(**record["kept"])
    counts = (kept.n_slots, kept.n_seen, *(kept.rows or ()), *record.get("held", ()))
    require(all(type(n) is int and 0 <= n <= MOST for n in counts), "it counts beyond all bounds")
    if positions is not None and positions.numel() and not positions.is_meta:
        fits = int(positions.min()) >= -1 and int(positions.max()) < kept.n_seen
        require(fits, f"it holds positions beyond {kept.n_seen}")
    return kept


def _pruned_layer(record: Record, stored: Any) -> PrunedLayer:
    kind: Any = kind_of(stored)
    if record["kind"] == "channels":
        recent_keys = record["recent_keys"]
        layer: PrunedLayer = ChannelPrunedLayer(stored, record["channels"], recent_keys.shape[-1])
        layer.recent_keys = recent_keys
    else:
        layer = kind(stored)
    layer.kept, layer.carried = _kept(record, record["kept"]["positions"]), record["carried"]
    if record["rerotation"] is not None:
        layer.rerotation = Rerotation(**record["rerotation"])
    return layer


def _ragged_layer(record: Record) -> RaggedLayer:
    recent, positions = Recent(record["recent_keys"], record["recent_values"]), record["positions"]
    layer = RaggedLayer(_kept(record, positions), record["n_heads"], recent)
    chosen = torch.arange(len(positions), device=positions.device)
    layer.lay_out(record["keys"], record["values"], positions, chosen, list(record["held"]))
    layer.carried, layer.carried_until = record["carried"], record["carried_until"]
    return layer
