"""Files of records: safetensors, and one line of JSON that says what the tensors are.

A file is written at once or not at all, never over what somebody else has put there. What is read
is checked, and copied, before anybody sees it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from press_core.cache.records import CacheFileError
from press_core.calibration import METADATA
from press_core.errors import first_line

KIND = "compressed cache"
"""What files say that they hold."""

FORMAT_VERSION = 1
"""Of the files that are written."""

_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if type(x) is torch.dtype}


# ---- records as JSON and tensors -----------------------------------------------------------------


def packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON has it, with the names of the tensors that go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = _own(value, tensors)
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"of": [[k, packed(x, f"{name}.{k}", tensors)] for k, x in value.items()]}
    return value


def _own(value: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """`value` on the CPU, in memory that no other tensor of the file lies in."""
    found = value.detach().cpu().contiguous()
    taken = {x.untyped_storage().data_ptr() for x in tensors.values() if x.numel()}
    return found.clone() if found.untyped_storage().data_ptr() in taken else found


def unpacked(description: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `packed` was given.

    Raises:
        CacheFileError: if it does not name each of `tensors` once.
    """
    left = dict(tensors)

    def value(packed: Any) -> Any:
        if packed is None or isinstance(packed, (bool, int, float, str)):
            return packed
        ((what, content),) = packed.items()
        if what == "tensor":
            return left.pop(content)
        if what == "dtype":
            return _DTYPES[content]
        if what == "of":
            return {key: value(x) for key, x in content if type(key) in (int, str)}
        raise ValueError(what)

    try:
        found = value(description)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CacheFileError("its description does not fit what it holds") from error
    if left:
        raise CacheFileError(f"nobody knows what its {min(left)!r:.60} is")
    return found


# ---- writing -------------------------------------------------------------------------------------


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse to write over what is there, unless that is asked for and a compressed cache.

    Raises:
        CacheFileError: saying what is in the way.
    """
    if not path.parent.is_dir():
        raise CacheFileError(f"there is no folder {str(path.parent)!r} to write {path.name!r} to")
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise CacheFileError(
            f"{str(path)!r} is there already; give another name, or overwrite=True to replace a "
            "compressed cache"
        )
    if path.is_symlink() or not path.is_file():
        raise CacheFileError(f"{str(path)!r} is no file; give another name")
    _said_by(path)


def write(
    path: Path, tensors: dict[str, Tensor], about: Mapping[str, Any], overwrite: bool
) -> None:
    """Write the file at once or not at all."""
    header = _as_json(about)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        save_file(tensors, part, {METADATA: header})
        if overwrite:
            part.replace(path)
        else:
            _rename_to_new(part, path)
    except FileExistsError as error:
        raise CacheFileError(f"{str(path)!r} has come meanwhile; give another name") from error
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise CacheFileError(f"cannot write {str(path)!r}: {first_line(error)}") from error
    finally:
        part.unlink(missing_ok=True)


def _rename_to_new(part: Path, path: Path) -> None:
    """Rename a file, unless there is one of that name.

    Raises:
        FileExistsError: if there is.
    """
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        part.rename(path)


def _as_json(about: Mapping[str, Any]) -> str:
    try:
        return json.dumps(about)
    except (TypeError, ValueError, RecursionError) as error:
        raise CacheFileError(f"notes are no JSON: {first_line(error)}") from error


# ---- reading -------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, Any]:
    """What a file says about itself.

    Raises:
        CacheFileError: if it does not say that it is a compressed cache of this version.
    """
    about = _said_by(path)
    if about.get("version") != FORMAT_VERSION:
        raise CacheFileError(
            f"{str(path)!r} has version {about.get('version')!r:.20} of the format; this release "
            f"reads {FORMAT_VERSION}: make the cache anew"
        )
    return about


def _said_by(path: Path) -> dict[str, Any]:
    """The same, whatever version it is of."""
    if not path.is_file():
        raise CacheFileError(f"there is no file {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "null"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CacheFileError(
            f"{str(path)!r} is no compressed cache: {first_line(error)}"
        ) from error
    if not isinstance(about, dict) or about.get("kind") != KIND:
        said = about.get("kind") if isinstance(about, dict) else None
        holds = f"it holds {said!r:.60}" if said else "nothing in it says so"
        raise CacheFileError(f"{str(path)!r} is no compressed cache: {holds}")
    return about


def read_tensors(path: Path, group: str) -> dict[str, Tensor]:
    """Copies of the tensors of a file whose names begin with `group`."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [n for n in file.keys() if n.split(".")[0] == group]  # noqa: SIM118
            return {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise CacheFileError(first_line(error)) from error
