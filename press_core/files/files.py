"""Files of records: safetensors, and one line of JSON that says what the tensors are.

A file is written at once or not at all, never over what somebody else has put there.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from press_core.errors import PressError, first_line
from press_core.files.tensors import METADATA, UNREADABLE, read, require

KIND = "compressed cache"
"""What files say that they hold."""

FORMAT_VERSION = 2
"""Of the files that are written."""


class CacheFileError(PressError, ValueError):
    """A file is no compressed cache, or not one for this model."""


@contextmanager
def refused(path: Path, what: str) -> Iterator[None]:
    """Raises a `CacheFileError`, that `path` is `what`, for all that may be wrong with a file."""
    try:
        yield
    except CacheFileError:
        raise
    except UNREADABLE as error:
        raise CacheFileError(f"{str(path)!r} {what}: {first_line(error)}") from error


_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if type(x) is torch.dtype}


def packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON has it, with the names of the tensors that go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"of": [[k, packed(x, f"{name}.{k}", tensors)] for k, x in value.items()]}
    return value


def unpacked(description: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `packed` was given; each of `tensors` has to be named in it once."""
    left = dict(tensors)

    def value(packed: Any) -> Any:
        if isinstance(packed, list):
            return tuple(packed)
        if not isinstance(packed, dict):
            return packed
        ((what, content),) = packed.items()
        if what == "of":
            return {key: value(x) for key, x in content}
        return left.pop(content) if what == "tensor" else _DTYPES[content]

    found = value(description)
    require(not left, f"nobody knows what its {min(left, default='')!r:.60} is")
    return found


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse to write over what is there, unless that is asked for and a compressed cache.

    Raises:
        CacheFileError: saying what is in the way.
    """
    with refused(path, "cannot be written"):
        require(path.parent.is_dir(), "there is no such folder")
        if os.path.lexists(path):
            advice = "give another name, or overwrite=True to replace a compressed cache"
            require(overwrite, f"a file is there already; {advice}")
            require(path.is_file() and not path.is_symlink(), "it is no file")
            read_header(path, any_version=True)


def write(
    path: Path, tensors: dict[str, Tensor], about: Mapping[str, Any], overwrite: bool
) -> None:
    """Write the file at once or not at all."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with refused(path, "cannot be written"):
        try:
            part.touch()
            mode = part.stat().st_mode
            save_file(tensors, part, {METADATA: json.dumps(about)})
            part.chmod(mode)  # safetensors lets nobody else read it
            if overwrite:
                part.replace(path)
            else:
                os.link(part, path)  # unless there is one of that name
        finally:
            part.unlink(missing_ok=True)


def read_header(path: Path, any_version: bool = False) -> dict[str, Any]:
    """What a file says about itself.

    Raises:
        CacheFileError: if it does not say that it is a compressed cache of this version.
    """
    with refused(path, "is no compressed cache"):
        require(path.is_file(), "there is no file")
        about = dict(read(path, "")[0])
        require(about.get("kind") == KIND, "nothing in it says so")
        version = about.get("version")
        what = f"has version {version!r:.20} of the format; this release reads {FORMAT_VERSION}"
        require(any_version or version == FORMAT_VERSION, f"it {what}: make the cache anew")
    return about
