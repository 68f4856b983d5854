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

_PLAIN = type(None), bool, int, float, str, tuple, torch.dtype, Tensor
_PARTS: dict[str, Any] = {"Kept": Kept, "Rerotation": Rerotation}
_OF_SCOPES = "memories", "needs", "is_first", "_has_told_sizes"


# ---- layers to records ---------------------------------------------------------------------------


def record_of(value: Any, said: str = "") -> Any:
    """All that a layer holds, or a part of it; tensors in it are the layer's own.

    Args:
        said: what it is a part of, and is called there.

    Raises:
        UnsupportedCacheError: if it holds what cannot be kept.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: record_of(x, said) for key, x in value.items()}
    if isinstance(value, PrunedLayer):
        _check_at_rest(value)
        if not value.is_initialized:
            return record_of(value.inner)  # it was reset, and knows nothing
    elif said and kind.__name__ not in _PARTS:
        raise UnsupportedCacheError(
            f"cannot save {said} is a {kind.__name__}, and only numbers, words and tensors are kept"
        )
    elif kind_of(value) not in (None, PrunedLayer, PrunedHybridLayer):
        raise UnsupportedCacheError(
            f"cannot save a {kind.__name__}, whose states lie in a buffer or in the format of a "
            "library; use a DynamicCache"
        )
    held = _held_by(value) if isinstance(value, RaggedLayer) else vars(value)
    state = {
        name: record_of(x, "" if name == "inner" else f"a {kind.__name__}: its {name}")
        for name, x in held.items()  # devices follow from where a layer is put
        if name not in _OF_SCOPES and not isinstance(x, torch.device)
    }
    return {"kind": kind.__name__, "state": state}


def _check_at_rest(layer: PrunedLayer) -> None:
    torn = layer.is_unusable or any(memory.in_prefill for memory in layer.memories.values())
    if torn or (not layer.is_initialized and type(layer) in (RaggedLayer, ChannelPrunedLayer)):
        raise UnsupportedCacheError(
            f"cannot save a {type(layer).__name__} that was abandoned in the middle of a forward, "
            "reset, or whose prefill is under way; save caches at rest"
        )


def _held_by(layer: RaggedLayer) -> Record:
    """What heads of different lengths hold, one after the other."""
    keys, values, positions = layer.packed()
    recent_keys, recent_values = (x[:, : layer.n_recent] for x in layer.recent.states())
    own = {n: x for n, x in vars(layer).items() if n in ("kept", "carried", "carried_until")}
    return {
        **own,
        "keys": keys,
        "values": values,
        "positions": positions,
        "held": tuple(layer.held),
        "n_heads": layer.n_heads,
        "recent_keys": recent_keys,
        "recent_values": recent_values,
    }


# ---- records to layers ---------------------------------------------------------------------------


def layer_from(record: Any, template: Any, device: torch.device) -> Any:
    """The layer that a record describes, with tensors of its own on `device`.

    Args:
        template: the empty layer that a cache made for the model has in this place, or None.

    Raises:
        ValueError: or another of `UNREADABLE`, if the installed release knows no such layer.
    """
    if isinstance(record, Tensor):
        return record.to(device)
    if not isinstance(record, dict):
        return record
    if record.keys() != {"kind", "state"}:
        return {key: layer_from(x, template, device) for key, x in record.items()}
    kind, state = record["kind"], layer_from(record["state"], template, device)
    if kind in _PARTS:
        return _PARTS[kind](**state)
    if kind == "RaggedLayer":
        return _ragged_layer(state)
    if kind == "ChannelPrunedLayer":
        head_dim = state["recent_keys"].shape[-1]
        layer: Any = ChannelPrunedLayer(state["inner"], state["channels"], head_dim)
    elif "inner" in state:
        layer = kind_of(state["inner"])(state["inner"])  # type: ignore[misc]
    elif type(template).__name__ == kind:
        layer = template
    elif kind == "DynamicSlidingWindowLayer":
        layer = DynamicSlidingWindowLayer(state["sliding_window"])
    else:
        require(kind == "DynamicLayer", f"it has a layer of an unknown kind {kind!r}")
        layer = DynamicLayer()
    vars(layer).update(state)
    for name in state:
        if name.endswith("dtype") and state[name] is not None:
            setattr(layer, name.removesuffix("dtype") + "device", device)
    if isinstance(layer, PrunedLayer):
        _check(layer.kept, layer.kept.positions, ())
    return layer


def _check(kept: Kept, positions: Tensor | None, held: tuple[int, ...]) -> None:
    """Require that counts and positions are in bounds, whoever has sealed them."""
    counts = (kept.n_slots, kept.n_seen, *(kept.rows or ()), *held)
    require(all(type(n) is int and 0 <= n <= MOST for n in counts), "it counts beyond all bounds")
    if positions is not None and positions.numel() and not positions.is_meta:
        fits = int(positions.min()) >= -1 and int(positions.max()) < kept.n_seen
        require(fits, f"it holds positions beyond {kept.n_seen}")


def _ragged_layer(state: Record) -> RaggedLayer:
    kept, positions = state["kept"], state["positions"]
    _check(kept, positions, state["held"])
    recent = Recent(state["recent_keys"], state["recent_values"])
    layer = RaggedLayer(kept, state["n_heads"], recent)
    chosen = torch.arange(len(positions), device=positions.device)
    layer.lay_out(state["keys"], state["values"], positions, chosen, list(state["held"]))
    layer.carried, layer.carried_until = state["carried"], state["carried_until"]
    return layer
