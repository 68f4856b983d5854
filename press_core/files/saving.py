"""Compressed caches in files: compress once, ask tomorrow.

A file is safetensors: tensors, and one line of JSON that says what they are, of which model, and
what was evicted. It holds no code and no pickle; a seal tells whether anything was changed.

```python
save_cache(cache, "context.safetensors", model, press=press)
cache = load_cache("context.safetensors", model)
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from press_core.cache.caches import kept_lengths, known, mask_layer
from press_core.cache.positions import tokens_seen
from press_core.cache.pruned import PrunedLayer
from press_core.cache.reading import reading_needs
from press_core.errors import UnsupportedCacheError, UnsupportedModelError
from press_core.files import files
from press_core.files.files import read, read_header, refused, require
from press_core.files.identity import identity, name_of
from press_core.files.records import layer_from, sealed, unsealed
from press_core.model.sites import AttentionSite
from press_core.press import Press
from press_core.probe import attention_sites
from press_core.probe.watching import layers_of

_CACHES = ("self_attention_cache", "cross_attention_cache")


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
    files.check_target(path, overwrite)
    sites = attention_sites(model)
    if any(site.ranks.size > 1 for site in sites):
        raise UnsupportedModelError(
            "this process holds some of the model's heads only (tensor parallelism), so that its "
            "cache is a part of one; save caches of a model that is in one piece"
        )
    tensors: dict[str, Tensor] = {}
    given = {"input_ids": input_ids, "attention_mask": attention_mask}
    inputs = {name: ids.long() for name, ids in given.items() if ids is not None}
    about = {
        "kind": files.KIND,
        "version": files.FORMAT_VERSION,
        "made_with": {name: _version(name) for name in ("hook-or-patch", "transformers", "torch")},
        "model": {"name": name_of(model), **identity(model)},
        "press": None if press is None else repr(press),
        **_summary(cache, sites),
        "notes": dict(notes or {}),
        "inputs": sealed(inputs, "inputs", tensors),
        "caches": sealed(_parts(cache), "cache", tensors),
    }
    files.write(path, tensors, about, overwrite)
    return path


def _parts(cache: Any) -> dict[str, dict[str, Any]]:
    """The caches that `cache` is made of, by name.

    Raises:
        UnsupportedCacheError: if it is of another kind.
    """
    of_both = type(cache) is EncoderDecoderCache
    parts = {name: getattr(cache, name) for name in _CACHES} if of_both else {_CACHES[0]: cache}
    for part in parts.values():
        if type(part) is not DynamicCache:
            raise UnsupportedCacheError(
                f"cannot save a {type(part).__name__}; only a DynamicCache, or an "
                "EncoderDecoderCache of two, can be kept"
            )
        if getattr(part, "offloading", False) and torch.cuda.is_available():
            torch.cuda.synchronize()  # layers may be on their way
    return {
        name: {
            "grows": part.layer_class_to_replicate is DynamicLayer,
            "layers": dict(enumerate(part.layers)),
        }
        for name, part in parts.items()
    }


def _version(name: str) -> str:
    """Of a library; unknown of this one, run from a checkout that is not installed."""
    return next((str(x.version) for x in distributions(name=name)), "unknown")


def _summary(cache: Any, sites: list[AttentionSite]) -> dict[str, Any]:
    """How many tokens the cache has seen, and which share of them it has lost."""
    own = getattr(cache, _CACHES[0], cache)
    lengths, seen, kept, most = kept_lengths(own), 0.0, 0.0, 0
    for site in sites:
        if site.layer_idx >= len(lengths) or not lengths[site.layer_idx].numel():
            continue
        layer = known(own, site.layer_idx)
        of_rows, most = tokens_seen(layer, None), max(most, layer.n_seen)
        seen += sum(of_rows) / len(of_rows)
        kept += float(lengths[site.layer_idx].double().mean())
    return {"n_seen": most, "evicted": max(0.0, 1 - kept / seen) if seen else 0.0}


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
    now = identity(model)
    with refused(path, "cannot be read"):
        made_with = about["made_with"]["transformers"]
        require(
            any_version or made_with == transformers.__version__,
            f"it was written with transformers {made_with!s:.20}, and {transformers.__version__} "
            "is installed, which may compute other keys and values: pass any_version=True to try",
        )
        differing = _differences(about["model"], now, any_version)
        name = f"{about['model']['name']!s:.60}"
        require(not differing, f"it is a cache of another model ({name!r}): {differing}")
        parts = unsealed(about["caches"], read(path, "cache")[1])
        return _cache(parts, model, None if device is None else torch.device(device))


def about_cache(path: str | Path) -> SavedCache:
    """What a file says of the compressed cache that it holds; no model is needed.

    Raises:
        CacheFileError: if there is no such file, or if it is not what `save_cache` writes.
    """
    path = Path(path)
    about = read_header(path)
    with refused(path, "cannot be read"):
        return SavedCache(
            path,
            str(about["model"]["name"]),
            None if about["press"] is None else str(about["press"]),
            int(about["n_seen"]),
            float(about["evicted"]),
            unsealed(about["inputs"], read(path, "inputs")[1]),
            dict(about["notes"]),
            dict(about["made_with"]),
        )


def _differences(former: dict[str, Any], now: dict[str, Any], any_version: bool) -> str:
    """What tells a model from the one that has filled a cache; empty: nothing."""
    there, here = former["config"], now["config"]
    # Releases differ in which fields they know.
    names = here.keys() & there.keys() if any_version else here.keys() | there.keys()
    differing = [
        f"{name} is {there.get(name)!s:.40} there and {here.get(name)!s:.40} here"
        for name in sorted(names, key=lambda name: (name not in ("config_class", "dtype"), name))
        if there.get(name) != here.get(name)
    ]
    if not differing and former["weights"] != now["weights"]:
        return "it has the same configuration, and other weights or adapters"
    return "; ".join(differing[:2])


def _cache(parts: Any, model: Any, device: torch.device | None) -> Any:
    made = [_part(record, model, device) for record in parts.values()]
    by_layer = {site.layer_idx: site for site in attention_sites(model)}
    for index, layer in enumerate(made[0].layers):
        if isinstance(layer, PrunedLayer):
            layer.needs |= reading_needs(made[0], layer, by_layer[index])
            layer.is_first = layer is mask_layer(made[0])
    return made[0] if len(made) == 1 else EncoderDecoderCache(*made)


def _part(record: dict[str, Any], model: Any, device: torch.device | None) -> DynamicCache:
    known_kinds = DynamicLayer(), DynamicSlidingWindowLayer(1)
    empty = (*known_kinds, *DynamicCache(config=model.config).layers)
    templates = {type(layer).__name__: layer for layer in empty}
    runs_on = {} if device is not None else _devices(model)
    first = device or _runs_on(model)
    cache = DynamicCache()
    cache.layer_class_to_replicate = DynamicLayer if record["grows"] else None
    cache.layers = [
        layer_from(layer, templates, runs_on.get(i, first)) for i, layer in record["layers"].items()
    ]
    return cache


def _devices(model: nn.Module) -> dict[int, torch.device]:
    """Where each layer of a model runs."""
    modules: list[tuple[str, Any]] = layers_of(model)  # the first of each layer counts
    of_layers = [(module.layer_idx, module) for _, module in modules if [*module.parameters()]]
    return {index: _runs_on(module) for index, module in reversed(of_layers)}


def _runs_on(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), torch.empty(0))
    if parameter.device.type != "meta":
        return parameter.device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())  # of accelerate
    found = (getattr(hook, "execution_device", None) for hook in hooks)
    device = next((x for x in found if x is not None), "cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
