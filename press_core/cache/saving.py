"""Compressed caches in files: compress once, ask tomorrow.

A file is safetensors: tensors, and one line of JSON that says what they are, of which model, and
what was evicted. It holds no code and no pickle; what it says is checked before it is believed.

```python
save_cache(cache, "context.safetensors", model, press=press)
cache = load_cache("context.safetensors", model)
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from press_core.cache.caches import kept_lengths
from press_core.cache.files import (
    FORMAT_VERSION,
    KIND,
    check_target,
    packed,
    read_header,
    read_tensors,
    unpacked,
    write,
)
from press_core.cache.pruned import PrunedLayer
from press_core.cache.ragged import RaggedLayer
from press_core.cache.reading import reading_needs
from press_core.cache.records import CacheFileError, Fields, Record, layer_from, record_of
from press_core.errors import UnsupportedCacheError, UnsupportedModelError
from press_core.model.identity import identity, name_of
from press_core.model.probe import verified_sites
from press_core.model.sites import AttentionSite
from press_core.press import Press

_CACHES = ("self_attention_cache", "cross_attention_cache")
_INPUTS = ("input_ids", "attention_mask")


@dataclass(frozen=True, eq=False)
class SavedCache:
    """What a file says of the cache that it holds.

    Attributes:
        path: of the file.
        model: what the model is called.
        press: the press that left the cache, as text; None: nobody said.
        n_seen: tokens that the cache has seen, padding included.
        evicted: share of them that it has lost, on average over heads and layers.
        inputs: `input_ids` and `attention_mask` of the context, `(B, S)` int64 each, as far as they
            were saved.
        notes: what whoever saved it has added.
        made_with: versions of the libraries that wrote it.
    """

    path: Path
    model: str
    press: str | None
    n_seen: int
    evicted: float
    inputs: dict[str, Tensor] = field(repr=False)
    notes: dict[str, Any] = field(repr=False)
    made_with: dict[str, str] = field(repr=False)


# ---- writing -------------------------------------------------------------------------------------


def save_cache(
    cache: Cache,
    path: str | Path,
    model: nn.Module,
    *,
    press: Press | None = None,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    notes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a cache to a safetensors file, whatever a press has left of it.

    It holds keys and values, which tokens they are, and all that later forwards need: a loaded
    cache answers, bit for bit, as the one that was saved. What an open scope remembers beside the
    cache (steps counted, states buffered by presses that act while decoding) is not in it: they
    begin anew, as with any cache that a new scope is given.

    Args:
        cache: a `DynamicCache`, or an `EncoderDecoderCache` of two, at rest between forwards.
        path: of the file; its folder has to be there.
        model: that has filled it.
        press: that has pruned it, to be named in the file.
        input_ids, attention_mask: of the context, `(B, S)`; `generate` wants to have them again.
        notes: more to be kept, as JSON has it.
        overwrite: replace a file of that name, if it holds a compressed cache.

    Returns:
        The path.

    Raises:
        UnsupportedCacheError: for quantized and other caches, and for layers, that cannot be kept.
        UnsupportedModelError: if the model cannot be told from others, or holds a part of the heads
            only (tensor parallelism).
        CacheFileError: if there is such a file already, or if it cannot be written.
    """
    path = Path(path)
    check_target(path, overwrite)
    sites = verified_sites(model)
    if any(site.heads.size > 1 for site in sites):
        raise UnsupportedModelError(
            "this process holds some of the model's heads only (tensor parallelism), so that its "
            "cache is a part of one; save caches of a model that is in one piece"
        )
    tensors: dict[str, Tensor] = {}
    parts = {name: _part_record(part) for name, part in _parts(cache)}
    given = zip(_INPUTS, (input_ids, attention_mask), strict=True)
    inputs = {name: ids.long() for name, ids in given if ids is not None}
    about = {
        "kind": KIND,
        "version": FORMAT_VERSION,
        "made_with": _versions(),
        "model": {"name": name_of(model), **identity(model)},
        "press": None if press is None else repr(press),
        **_summary(cache, sites),
        "notes": dict(notes or {}),
        "inputs": packed(inputs, "inputs", tensors),
        "caches": packed(parts, "cache", tensors),
    }
    write(path, tensors, about, overwrite)
    return path


def _parts(cache: Any) -> Iterator[tuple[str, Any]]:
    """The caches that `cache` is made of, by name.

    Raises:
        UnsupportedCacheError: if it is of another kind.
    """
    of_both = type(cache) is EncoderDecoderCache
    parts = [(n, getattr(cache, n)) for n in _CACHES] if of_both else [(_CACHES[0], cache)]
    for name, part in parts:
        if type(part) is not DynamicCache:
            raise UnsupportedCacheError(
                f"cannot save a {type(part).__name__}; only a DynamicCache, or an "
                "EncoderDecoderCache of two, can be kept"
            )
        yield name, part


def _part_record(cache: Any) -> Record:
    if getattr(cache, "offloading", False) and torch.cuda.is_available():
        torch.cuda.synchronize()  # layers may be on their way
    grows = cache.layer_class_to_replicate is DynamicLayer
    return {"grows": grows, "layers": dict(enumerate(map(record_of, cache.layers)))}


def _versions() -> dict[str, str]:
    try:
        own = version("hook-or-patch")
    except PackageNotFoundError:  # run from a checkout that is not installed
        own = "unknown"
    return {
        "hook-or-patch": own,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def _summary(cache: Any, sites: list[AttentionSite]) -> dict[str, Any]:
    """How many tokens the cache has seen, and which share of them it has lost."""
    own = getattr(cache, _CACHES[0], cache)
    lengths = kept_lengths(own)
    seen = kept = 0.0
    for site in sites:
        if site.layer_idx < len(lengths) and lengths[site.layer_idx].numel():
            kept += float(lengths[site.layer_idx].double().mean())
            seen += _tokens_seen(own.layers[site.layer_idx])
    evicted = max(0.0, 1 - kept / seen) if seen else 0.0
    return {"n_seen": max(map(_n_seen, own.layers), default=0), "evicted": evicted}


def _n_seen(layer: Any) -> int:
    if isinstance(layer, PrunedLayer):
        return layer.n_seen
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0


def _tokens_seen(layer: Any) -> float:
    """How many tokens a layer has seen per row, as far as it knows which of them were padding."""
    padding: float = 0.0
    if isinstance(layer, RaggedLayer):
        padding = layer.mean_padding
    elif isinstance(layer, PrunedLayer) and layer.kept.padding is not None:
        padding = float(layer.kept.padding.double().mean())
    return _n_seen(layer) - padding


# ---- reading -------------------------------------------------------------------------------------


def load_cache(
    path: str | Path,
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    any_version: bool = False,
) -> Any:
    """Read what `save_cache` has written.

    Args:
        path: of the file.
        model: the one that had filled the cache: same configuration, weights and dtype, on whatever
            device and with any attention implementation.
        device: where to put all layers; None: each where the model's layer is.
        any_version: read a file that was written with another release of transformers too. It is
            right if both compute the same keys and values; layers that the installed one does not
            know are refused.

    Returns:
        A `DynamicCache` or an `EncoderDecoderCache`, whose tensors are its own.

    Raises:
        CacheFileError: if there is no such file, if it is not what `save_cache` writes, or if it
            belongs to another model or version; in one line that says which.
        UnsupportedModelError: if the model cannot be told from others.
    """
    path = Path(path)
    about = read_header(path)
    _check_versions(path, about, any_version)
    _check_model(path, about.get("model"), model, any_version)
    sites = verified_sites(model)
    try:
        parts = unpacked(about.get("caches"), read_tensors(path, "cache"))
        return _cache(parts, model, sites, None if device is None else torch.device(device))
    except CacheFileError as error:
        raise CacheFileError(f"{str(path)!r} is damaged: {error}") from error


def about_cache(path: str | Path) -> SavedCache:
    """What a file says of the compressed cache that it holds; no model is needed.

    Raises:
        CacheFileError: if there is no such file, or if it is not what `save_cache` writes.
    """
    path = Path(path)
    fields = Fields(read_header(path), "its header")
    try:
        inputs = unpacked(fields.get("inputs"), read_tensors(path, "inputs"))
        known = isinstance(inputs, dict) and set(inputs) <= set(_INPUTS)
        if not known or not all(map(_are_ids, inputs.values())):
            raise fields.wrong("inputs")
        return SavedCache(
            path,
            Fields(fields.mapping("model"), "its model").text("name"),
            None if fields.get("press") is None else fields.text("press"),
            fields.number("n_seen"),
            fields.share("evicted", 1),
            inputs,
            fields.mapping("notes"),
            fields.mapping("made_with"),
        )
    except CacheFileError as error:
        raise CacheFileError(f"{str(path)!r} is damaged: {error}") from error


def _are_ids(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2 and x.dtype == torch.int64


def _check_versions(path: Path, about: dict[str, Any], any_version: bool) -> None:
    made_with = about.get("made_with")
    former = made_with.get("transformers") if isinstance(made_with, dict) else None
    if former == transformers.__version__ or any_version:
        return
    raise CacheFileError(
        f"{str(path)!r} was written with transformers {former!s:.20}, and "
        f"{transformers.__version__} is installed, which may compute other keys and values; make "
        "the cache anew, or pass any_version=True"
    )


def _check_model(path: Path, former: Any, model: Any, any_version: bool) -> None:
    """Refuse a model other than the one that has filled the cache."""
    now = identity(model)
    if not isinstance(former, dict) or not isinstance(former.get("config"), dict):
        raise CacheFileError(f"{str(path)!r} is damaged: it does not say of which model it is")
    differing = [
        f"{name} is {former.get(name)!s:.40} there and {now[name]!s:.40} here"
        for name in ("config_class", "dtype")
        if former.get(name) != now[name]
    ]
    names = set(former["config"]) | set(now["config"])
    if any_version:  # releases differ in which fields they know
        names &= set(former["config"]) & set(now["config"])
    for name in sorted(names):
        there, here = former["config"].get(name), now["config"].get(name)
        if there != here:
            differing.append(f"{name} is {there!s:.40} there and {here!s:.40} here")
    if not differing and former.get("weights") != now["weights"]:
        differing = ["it has the same configuration, and other weights or adapters"]
    if differing:
        raise CacheFileError(
            f"{str(path)!r} is a cache of another model ({former.get('name')!s:.60}): "
            f"{'; '.join(differing[:3])}"
        )


def _cache(parts: Any, model: Any, sites: list[AttentionSite], device: torch.device | None) -> Any:
    names = list(parts) if isinstance(parts, dict) else []
    if names not in ([_CACHES[0]], list(_CACHES)):
        raise CacheFileError("it does not say what it holds")
    devices = _devices(model)
    made = [_part(parts[name], model, devices, device) for name in names]
    by_layer = {site.layer_idx: site for site in sites}
    for index, layer in enumerate(made[0].layers):
        if isinstance(layer, (PrunedLayer, RaggedLayer)) and index not in by_layer:
            raise CacheFileError(f"layer {index} was pruned, which no press can do in this model")
        if isinstance(layer, PrunedLayer):
            layer.needs = reading_needs(made[0], layer, by_layer[index])
    return made[0] if len(made) == 1 else EncoderDecoderCache(*made)


def _part(
    record: Any, model: Any, devices: Mapping[int, torch.device], device: torch.device | None
) -> DynamicCache:
    layers = record.get("layers") if isinstance(record, dict) else None
    templates = DynamicCache(config=model.config).layers
    n_layers = len(templates) or model.config.get_text_config(decoder=True).num_hidden_layers
    if not isinstance(layers, dict) or list(layers) != list(range(len(layers))):
        raise CacheFileError("it has no list of layers")
    grows = record.get("grows") is True
    if len(layers) > n_layers or (len(layers) < n_layers and not grows):
        raise CacheFileError(f"it has {len(layers)} layers, and the model {n_layers}")
    cache = DynamicCache()
    cache.layer_class_to_replicate = DynamicLayer if grows else None
    first = devices.get(-1, torch.device("cpu"))
    cache.layers = [
        layer_from(
            layers[i],
            templates[i] if i < len(templates) else None,
            devices.get(i, first) if device is None else device,
        )
        for i in layers
    ]
    batches = {len(layer.values) for layer in cache.layers if _has_rows(layer)}
    batches |= {layer.batch for layer in cache.layers if isinstance(layer, RaggedLayer)}
    if len(batches) > 1:
        raise CacheFileError(f"its layers hold {sorted(batches)} rows")
    return cache


def _has_rows(layer: Any) -> bool:
    values = getattr(layer, "values", None)
    return isinstance(values, Tensor) and values.dim() == 4


def _devices(model: nn.Module) -> dict[int, torch.device]:
    """Where each layer of a model runs; of -1: where the model begins."""
    found: dict[int, torch.device] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        parameter = next(module.parameters(), None)
        if type(index) is int and parameter is not None:
            found.setdefault(index, _runs_on(module, parameter))
    parameter = next(model.parameters(), None)
    if parameter is not None:
        found[-1] = _runs_on(model, parameter)
    return found


def _runs_on(module: nn.Module, parameter: Tensor) -> torch.device:
    if parameter.device.type != "meta":
        return parameter.device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())  # of accelerate
    found = (getattr(hook, "execution_device", None) for hook in hooks)
    device = next((x for x in found if x is not None), "cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
