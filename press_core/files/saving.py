"""Compressed caches in files: compress once, reuse later.

A file is in the safetensors format: tensors, and one JSON entry that describes them, the model and
what was evicted. It contains no code and no pickle; a seal detects changes.

```python
save_cache(cache, "context.safetensors", model, press=press)
cache = load_cache("context.safetensors", model)
```
"""

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import Cache

from press_core.cache import caches, positions, slots
from press_core.errors import UnsupportedCacheError, UnsupportedModelError
from press_core.files import files
from press_core.model.decoder import device_of
from press_core.model.sites import AttentionSite
from press_core.press import Press
from press_core.probe import attention_sites
from press_core.probe.watching import layers_of

_CACHES = ("self_attention_cache", "cross_attention_cache")


@dataclass(frozen=True, eq=False)
class SavedCache:
    """The description of a saved cache.

    Attributes:
        path: the file.
        model: name of the model.
        press: the press that pruned the cache, as text; None: not given.
        n_seen: tokens that the cache has seen, padding included.
        evicted: share of them that was evicted, on average over heads and layers.
        inputs: `input_ids` and `attention_mask` of the context, `(B, S)` int64 each, if saved.
        notes: the notes that were saved with it.
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
    """Write a cache, pruned or not, to a safetensors file.

    The file stores keys and values, the tokens that they belong to, and all that later forwards
    need: outputs with the loaded cache are bit-identical to outputs with the saved one. The
    memories of open scopes (steps counted, states buffered by presses that act while decoding) are
    not saved; presses start afresh, as with any cache in a new scope.

    Args:
        cache: a `DynamicCache`, or an `EncoderDecoderCache` of two, between forwards.
        path: the file; its folder must exist.
        model: the model that filled the cache.
        press: the press that pruned it, for the description.
        input_ids, attention_mask: of the context, `(B, S)`, which `generate` needs again.
        notes: a dict of further JSON data to store.
        overwrite: replace an existing file if it is a compressed cache.

    Returns:
        The path.

    Raises:
        UnsupportedCacheError: for quantized and other caches, and layers, that cannot be saved, and
            for contexts with images on models with 3-d positions.
        UnsupportedModelError: if the model cannot be identified, or if this process holds only some
            of its heads (tensor parallelism).
        CacheFileError: if the file exists already, or cannot be written.
    """
    path = files.path_of(path)
    files.check_target(path, overwrite)
    sites = attention_sites(model)
    _check_all_is_here(model, sites)
    tensors: dict[str, Tensor] = {}
    given = {"input_ids": input_ids, "attention_mask": attention_mask}
    inputs, said = _checked(path, given, notes)
    described = {"press": None if press is None else repr(press), **_summary(cache, sites)}
    about = {
        "kind": files.KIND,
        "version": files.FORMAT_VERSION,
        "made_with": {name: _version(name) for name in ("hook-or-patch", "transformers", "torch")},
        "model": {"name": name_of(model), **identity(model)},
        "notes": said,
        "about": files.sealed({**described, "inputs": inputs}, "about", tensors, {}),
        "caches": files.sealed(_layers(cache), "cache", tensors, files.kinds_of(model.config)),
    }
    with files.refused(path, "cannot be written"):
        files.write(path, tensors, about, overwrite)
    return path


def _check_all_is_here(model: nn.Module, sites: list[AttentionSite]) -> None:
    """Raise if other ranks or the model itself hold some of what reading the cache takes."""
    if any(site.ranks.size > 1 for site in sites):
        raise UnsupportedModelError(
            "this process holds some of the model's heads only (tensor parallelism), so its cache "
            "is incomplete; save caches of a model that is on one rank"
        )
    noted = [vars(module).get("rope_deltas") for module in model.modules()]
    if any(isinstance(deltas, Tensor) and bool(deltas.any()) for deltas in noted):
        raise UnsupportedCacheError(
            "the model itself, not the cache, stores by how much positions after an image differ "
            "(rope_deltas); save contexts of text only, after setting it to None if it is stale"
        )


def _checked(path: Path, given: Mapping[str, Any], notes: Any) -> tuple[dict[str, Tensor], Any]:
    """The inputs that are `given`, int64, and the notes.

    Raises:
        CacheFileError: if those are no tensors, or these no dict of JSON data.
    """
    inputs = {name: ids for name, ids in given.items() if ids is not None}
    with files.refused(path, "cannot be written"):
        for name, ids in inputs.items():
            what = f"{name} is a {type(ids).__name__}, not a tensor (B, S) of two dimensions"
            files.require(isinstance(ids, Tensor) and ids.dim() == 2, what)
    with files.refused(path, f"cannot hold notes={reprlib.repr(notes)}, only a dict of JSON data"):
        said = json.loads(json.dumps(dict(notes or {})))
    return {name: ids.long() for name, ids in inputs.items()}, said


def _layers(cache: Any) -> dict[str, list[Any]]:
    """The layers of the caches that `cache` consists of, by the name of the cache.

    Raises:
        UnsupportedCacheError: if one of them is not a `DynamicCache`.
    """
    layers = {}
    for name in _CACHES if type(cache) is EncoderDecoderCache else _CACHES[:1]:
        part = getattr(cache, name, cache)
        if type(part) is not DynamicCache:
            raise UnsupportedCacheError(
                f"cannot save a {type(part).__name__}; only a DynamicCache, or an "
                "EncoderDecoderCache of two, can be saved"
            )
        if getattr(part, "offloading", False) and torch.cuda.is_available():
            torch.cuda.synchronize()  # layers may still be copied
        layers[name] = part.layers
    return layers


def _version(name: str) -> str:
    """Version of an installed library; "unknown" if it runs from a checkout."""
    return next((str(x.version) for x in distributions(name=name)), "unknown")


def _summary(cache: Any, sites: list[AttentionSite]) -> dict[str, Any]:
    """The number of tokens seen, and the share of them that was evicted."""
    own = getattr(cache, _CACHES[0], cache)
    filled = [site.layer_idx for site in sites if not caches.is_empty(own, site.layer_idx)]
    layers = [caches.known(own, index) for index in filled]
    seen = sum(fmean(positions.tokens_seen(layer, None)) for layer in layers)
    kept = sum(float(layer.lengths().double().mean()) for layer in layers)
    n_seen = max((layer.n_seen for layer in layers), default=0)
    return {"n_seen": n_seen, "evicted": max(0.0, 1 - kept / seen) if seen else 0.0}


# ---- reading -------------------------------------------------------------------------------------


def load_cache(
    path: str | Path,
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    any_version: bool = False,
) -> Any:
    """Read a cache that `save_cache` has written.

    Args:
        path: the file.
        model: the model that filled the cache: same configuration, weights and dtype, on any device
            and with any attention implementation.
        device: device of all layers; None: for each layer the device of the model's layer.
        any_version: also read files written with another release of transformers. This is right if
            both releases compute the same keys and values; unknown kinds of layers are refused.

    Returns:
        A `DynamicCache` or an `EncoderDecoderCache`, which shares no tensors with the file.

    Raises:
        CacheFileError: if the file does not exist, was not written by `save_cache`, or belongs to
            another model or version; the message has one line.
        UnsupportedModelError: if the model cannot be identified.
    """
    path = files.path_of(path)
    about, tensors = files.read_cache(path, "cache")
    own = identity(model)
    with files.refused(path, "cannot be read"):
        made_with = about["made_with"]["transformers"]
        files.require(
            any_version or made_with == transformers.__version__,
            f"it was written with transformers {made_with!s:.20}, and {transformers.__version__} "
            "is installed, which may compute other keys and values: pass any_version=True to try",
        )
        differing = _differences(about["model"], own, any_version)
        name = f"{about['model']['name']!s:.60}"
        files.require(not differing, f"it is a cache of another model ({name!r}): {differing}")
        layers = files.unsealed(about["caches"], tensors)
        return _cache(layers, tensors, model, None if device is None else torch.device(device))


def about_cache(path: str | Path) -> SavedCache:
    """The description of a saved cache; needs no model.

    Raises:
        CacheFileError: if the file does not exist, or was not written by `save_cache`.
    """
    path = files.path_of(path)
    header, tensors = files.read_cache(path, "about")
    with files.refused(path, "cannot be read"):
        described = files.unsealed(header["about"], tensors)
        about = files.value_of(described, tensors, {}, torch.device("cpu"))
        name, notes = str(header["model"]["name"]), dict(header["notes"])
        made_with = dict(header["made_with"])
        return SavedCache(path, name, **about, notes=notes, made_with=made_with)


def _differences(saved: dict[str, Any], own: dict[str, Any], any_version: bool) -> str:
    """How a model differs from the one that filled a cache; empty: it does not."""
    before, current = saved["config"], own["config"]
    # Releases of transformers have different configuration fields.
    names = current.keys() & before.keys() if any_version else current.keys() | before.keys()
    differing = [
        f"{name} is {before.get(name)!s:.40} there and {current.get(name)!s:.40} here"
        for name in sorted(names, key=lambda name: (name not in ("config_class", "dtype"), name))
        if before.get(name) != current.get(name)
    ]
    if not differing and saved["weights"] != own["weights"]:
        return "it has the same configuration, and other weights or adapters"
    return "; ".join(differing[:2])


def _cache(
    of_caches: Any, tensors: Mapping[str, Tensor], model: Any, device: torch.device | None
) -> Any:
    kinds, runs_on, first = files.kinds_of(model.config), _devices(model), device_of(model)
    made = []
    for records in of_caches.values():
        made.append(DynamicCache())
        for i, record in enumerate(records):
            own_device = device or runs_on.get(i, first)
            made[-1].layers.append(files.value_of(record, tensors, kinds, own_device))
    slots.update_needs(made[0], attention_sites(model))
    return made[0] if len(made) == 1 else EncoderDecoderCache(*made)


def _devices(model: nn.Module) -> dict[int, torch.device]:
    """The device of each layer of a model."""
    modules: list[tuple[str, Any]] = layers_of(model)  # the first module of a layer decides
    of_layers = [(module.layer_idx, module) for _, module in modules if [*module.parameters()]]
    return {index: device_of(module) for index, module in reversed(of_layers)}


N_SAMPLED = 64
"""Number of elements per parameter, evenly spaced, that enter the digest."""

_IRRELEVANT = (
    *("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures"),
    *("_attn_implementation", "_attn_implementation_internal", "_experts_implementation"),
    *("id2label", "label2id", "problem_type", "use_cache", "return_dict", "auto_map"),
    *("output_attentions", "output_hidden_states"),
)
"""Configuration fields that do not affect keys and values."""


def identity(model: Any) -> dict[str, Any]:
    """A JSON description that identifies `model`.

    Its folder, device, class and attention implementation are not included: a model and its decoder
    body, on any device, have the same identity.

    Returns:
        `config`: the configuration's class and fields, and the dtype; `weights`: a digest of names,
        shapes and `N_SAMPLED` elements of every parameter, and of the active adapters.

    Raises:
        UnsupportedModelError: if the model has no configuration, or weights without data.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no configuration of transformers that identifies it"
        )
    body = getattr(model, "base_model", model)
    described = json.dumps(config.to_dict(), default=str, sort_keys=True)
    fields = json.loads(described, object_hook=_relevant)
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    kind = {"config_class": type(config).__name__, "dtype": dtype}
    return {"config": {**fields, **kind}, "weights": _digest(body)}


def name_of(model: Any) -> str:
    """Name of `model`: its hub id, or the last part of the folder that it was loaded from."""
    name = str(getattr(getattr(model, "config", None), "name_or_path", None) or "")
    return name if name.count("/") == 1 and not name.startswith((".", "/")) else name.split("/")[-1]


def _relevant(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _IRRELEVANT}


def _digest(body: nn.Module) -> str:
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, parameter in sorted(body.named_parameters()):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            for part in caches.flattened(_loaded(body, name, parameter)):
                flat = part.detach().reshape(-1)
                step = max(1, flat.numel() // N_SAMPLED)
                sample = flat[::step][:N_SAMPLED].cpu().contiguous()
                digest.update(sample.view(torch.uint8).numpy().tobytes())
    for name, module in body.named_modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):  # a layer of PEFT
            digest.update(f"{name} {module.disable_adapters} {module.active_adapters}".encode())
    return digest.hexdigest()


def _loaded(body: nn.Module, name: str, parameter: Tensor) -> Any:
    """A parameter, or the weights that accelerate keeps for it between forwards.

    Raises:
        UnsupportedModelError: if the parameter has no data in this process.
    """
    if parameter.device.type == "meta":
        owner, _, own = name.rpartition(".")
        hook = getattr(body.get_submodule(owner), "_hf_hook", None)  # of accelerate
        weights = getattr(hook, "weights_map", None)
        if weights is None:
            raise UnsupportedModelError(
                f"the parameter {name} has no data, so the model cannot be identified; "
                "load its weights"
            )
        return weights[own]
    return parameter
