"""The file format: safetensors, with one JSON entry that describes the tensors.

Files are written atomically and never replace other kinds of files. A cache layer is saved with its
states and metadata, but without what depends on scopes: how to read it, and their memories.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from press_core.cache.caches import PrunedHybridLayer
from press_core.cache.in_place import ChannelPrunedLayer, InPlaceLayer
from press_core.cache.layout import Blocks
from press_core.cache.pruned import PrunedLayer
from press_core.cache.ragged import RaggedLayer
from press_core.cache.tokens import Kept, ReadingNeeds
from press_core.errors import PressError, UnsupportedCacheError, first_line
from press_core.select import upcast

METADATA = "hook-or-patch"
"""Key of the metadata entry with the JSON description of the file."""

KIND = "compressed cache"
"""Value of the `kind` field in files of this format."""

FORMAT_VERSION = 7
"""Version of the format that is written and read."""


class CacheFileError(PressError, ValueError):
    """A file is not a compressed cache, or belongs to another model."""


def path_of(given: str | Path) -> Path:
    """A path that a user gives, in which `~` is the home folder."""
    return Path(os.path.expanduser(given))


def read(path: str | Path, group: str | None = None) -> tuple[Any, dict[str, Tensor]]:
    """The description in a file (empty if it has none), and its tensors, read when they are used.

    Args:
        group: read only tensors whose names start with `group` and a dot; None: all.

    Raises:
        Exception: of any type, for a malformed file.
    """
    with safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
        names = [n for n in file.keys() if group is None or n.split(".")[0] == group]  # noqa: SIM118
        return about, {name: file.get_tensor(name) for name in names}


def floats(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors of a file, in float32 or better.

    Raises:
        ValueError: if one of them is not of a floating-point dtype.
    """
    for name, tensor in tensors.items():
        require(tensor.is_floating_point(), f"{name!r:.80} is of {tensor.dtype}, not of floats")
    return {name: upcast(x.clone()) for name, x in tensors.items()}


def require(holds: bool, what: str) -> None:
    """Raise a `ValueError` with the message `what` unless `holds`."""
    if not holds:
        raise ValueError(what)


@contextmanager
def refused(path: Path, what: str, kind: type[PressError] = CacheFileError) -> Iterator[None]:
    """Convert every exception but a `PressError` to `kind`, with the message "`path` `what`"."""
    try:
        yield
    except PressError:
        raise
    except Exception as error:
        raise kind(f"{str(path)!r} {what}: {first_line(error)}") from error


def check_target(path: Path, overwrite: bool) -> None:
    """Raise if `path` cannot be written; only compressed caches may be replaced, with `overwrite`.

    Raises:
        CacheFileError: with the reason.
    """
    with refused(path, "cannot be written"):
        require(path.parent.is_dir(), "there is no such folder")
        if os.path.lexists(path):
            advice = "give another name; save_cache(overwrite=True) replaces a compressed cache"
            require(overwrite, f"a file is there already; {advice}")
            require(path.is_file() and not path.is_symlink(), "it is no regular file")
            read_cache(path, "", any_version=True)


def write(
    path: Path, tensors: dict[str, Tensor], about: Mapping[str, Any], overwrite: bool
) -> None:
    """Write the file atomically."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.touch()
        mode = part.stat().st_mode
        # A single metadata entry: safetensors writes several in arbitrary order, and equal contents
        # must give equal files.
        save_file(tensors, part, {METADATA: json.dumps(about)})
        part.chmod(mode)  # safetensors makes files readable by their owner only
        if not overwrite:
            path.touch(exist_ok=False)  # fails if the file exists by now
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_cache(path: Path, group: str, any_version: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """The description in the file of a cache, and a group of its tensors; see `read`.

    Args:
        any_version: accept other versions of the format.

    Raises:
        CacheFileError: if the file is not a compressed cache of this version of the format.
    """
    with refused(path, "is no compressed cache"):
        require(path.is_file(), "there is no file")
        about, tensors = read(path, group)
        holds = f"it holds {about['kind']!s:.80}" if "kind" in about else "nothing in it says so"
        require(about.get("kind") == KIND, holds)
        if not any_version:
            check_version(about, FORMAT_VERSION)
    return about, tensors


def check_version(about: Mapping[str, Any], known: int) -> None:
    """Raise a `ValueError` unless `about` has version `known` of its format."""
    version = about.get("version")
    what = f"has version {version!r:.20} of the format; this release reads {known}"
    require(version == known, f"it {what}: create it again")


MOST = 2**24
"""Upper bound of token counts in a file, which limits the tensors that are made from them."""

_OF_SCOPES = "memories", "needs", "is_first", "has_sized_mask", "attended_by"
_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if type(x) is torch.dtype}

Kinds = dict[str, Any]
"""By name of its class, an empty object of what a file holds: cache layers, and their parts."""


def kinds_of(config: Any) -> Kinds:
    """Those for a model.

    Args:
        config: of the model that fills the cache.
    """
    own = PrunedLayer, PrunedHybridLayer, RaggedLayer, ChannelPrunedLayer, Blocks, Kept
    slides = DynamicSlidingWindowLayer(sliding_window=1)  # from 5.8 to 5.13 a config comes first
    plain = DynamicLayer(), slides, *DynamicCache(config=config).layers
    return {type(x).__name__: x for x in (*map(object.__new__, own), *plain)}


# ---- writing -------------------------------------------------------------------------------------


def sealed(value: Any, name: str, tensors: dict[str, Tensor], kinds: Kinds) -> dict[str, Any]:
    """`value` as JSON, with a seal (a digest) that detects later changes.

    Args:
        value: mappings, plain values, tensors and cache layers.
        name: name of the group that its tensors are stored in.
        tensors: the tensors of the file, to which those of `value` are added.
        kinds: see `kinds_of`.

    Raises:
        UnsupportedCacheError: if a layer cannot be saved.
    """
    own: dict[str, Tensor] = {}

    def packed(x: Any) -> dict[str, Any]:
        if isinstance(x, (torch.dtype, torch.device)):  # the device is set when loading
            return {type(x).__name__: str(x).removeprefix("torch.")}
        if not isinstance(x, Tensor):
            return _record_of(x, kinds)
        key = f"{name}.{len(own)}"
        own[key] = x.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": key}

    description = json.loads(json.dumps(value, default=packed))
    tensors |= own
    return {"is": description, "seal": _seal(description, own)}


def _seal(description: Any, tensors: Mapping[str, Tensor]) -> str:
    """A digest of a description and its tensors."""
    digest = hashlib.sha256(json.dumps(description).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _record_of(value: Any, kinds: Kinds) -> dict[str, Any]:
    """The kind and the attributes of a layer, or of a part of it.

    Raises:
        UnsupportedCacheError: if it cannot be saved.
    """
    kind = type(value).__name__
    if type(kinds.get(kind)) is not type(value):
        raise UnsupportedCacheError(
            f"cannot save a {type(getattr(value, 'inner', value)).__name__}; numbers, strings, "
            "tensors and layers of a DynamicCache can be saved, none in a buffer or in the format "
            "of a library"
        )
    if isinstance(value, PrunedLayer):
        busy = value.is_unusable or any(memory.in_prefill for memory in value.memories.values())
        if busy or (isinstance(value, InPlaceLayer) and not value.is_initialized):
            raise UnsupportedCacheError(
                f"cannot save a {kind} that was abandoned in the middle of a forward, reset, or "
                "whose prefill is under way; save caches between forwards"
            )
    state = {name: x for name, x in vars(value).items() if name not in _OF_SCOPES}
    return {"kind": kind, "state": state}


# ---- reading -------------------------------------------------------------------------------------


def unsealed(description: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `sealed` has written, for `value_of`.

    Raises:
        ValueError: if the contents do not match the seal.
    """
    whole = description["seal"] == _seal(description["is"], tensors)
    require(whole, "it is not as it was written")
    return description["is"]


def value_of(x: Any, tensors: Mapping[str, Tensor], kinds: Kinds, device: torch.device) -> Any:
    """The value that was written as `x`, on `device`; lists are tuples.

    Args:
        tensors: the tensors of the file, which are copied.
        kinds: see `kinds_of`.

    Raises:
        ValueError: if a layer has invalid counts or positions.
        KeyError: if a layer is of an unknown kind.
    """
    if isinstance(x, list):
        return tuple([value_of(part, tensors, kinds, device) for part in x])
    if not isinstance(x, dict):
        return x
    if x.keys() == {"tensor"}:
        return tensors[x["tensor"]].to(device, copy=True)
    if x.keys() == {"dtype"}:
        return _DTYPES[x["dtype"]]
    if x.keys() == {"device"}:
        return device
    if x.keys() != {"kind", "state"}:  # JSON has string keys only
        parts = {key: value_of(part, tensors, kinds, device) for key, part in x.items()}
        return {int(key) if key.isdigit() else key: part for key, part in parts.items()}
    made = copy(kinds[x["kind"]])  # releases of transformers have different attributes
    # The layout of heads in blocks is read on the CPU, and made anew for the device.
    own_device = torch.device("cpu") if isinstance(made, Blocks) else device
    state = value_of(x["state"], tensors, kinds, own_device)
    if isinstance(made, PrunedLayer):
        made._reset_metadata()
        _check(state["kept"], state)
    vars(made).update(state)
    if isinstance(made, InPlaceLayer):
        made.needs = ReadingNeeds.ATTENTION
    if isinstance(made, RaggedLayer):
        made.select_rows(torch.arange(made.batch))
    return made


def _check(kept: Kept, state: Mapping[str, Any]) -> None:
    """Raise a `ValueError` unless counts and positions are in bounds; a seal can be forged."""
    counts = (kept.n_slots, kept.n_seen, *(kept.rows or ()), *state.get("held", ()))
    positions = state.get("slots", kept.positions)
    if positions is not None and positions.numel() and not positions.is_meta:
        counts += int(positions.min()) + 1, kept.n_seen - 1 - int(positions.max())
    fits = all(type(n) is int and 0 <= n <= MOST for n in counts)
    require(fits, f"it has counts beyond {MOST}, or positions beyond what it has seen")
