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

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from press_core.errors import PressError, first_line

METADATA = "hook-or-patch"
"""Entry of a file's metadata that says, as JSON, what it holds, of which model."""

KIND = "compressed cache"
"""What files say that they hold."""

FORMAT_VERSION = 4
"""Of the files that are written."""


class CacheFileError(PressError, ValueError):
    """A file is no compressed cache, or not one for this model."""


def read(path: str | Path, group: str | None = None) -> tuple[Any, dict[str, Tensor]]:
    """What a file says about itself (an empty dictionary: nothing), and copies of its tensors.

    Args:
        group: read only the tensors whose names begin with it and a dot; None: all.

    Raises:
        Exception: of any kind, by what lies in the file.
    """
    with safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
        names = [n for n in file.keys() if group is None or n.split(".")[0] == group]  # noqa: SIM118
        return about, {name: file.get_tensor(name).clone() for name in names}


def require(holds: bool, what: str) -> None:
    """Raise a `ValueError` that says `what` unless that `holds`."""
    if not holds:
        raise ValueError(what)


@contextmanager
def refused(path: Path, what: str, kind: type[PressError] = CacheFileError) -> Iterator[None]:
    """Raises an error of a kind, that `path` is `what`, for all that may be wrong with a file."""
    try:
        yield
    except PressError:
        raise
    except Exception as error:
        raise kind(f"{str(path)!r} {what}: {first_line(error)}") from error


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
        if not any_version:
            check_version(about, FORMAT_VERSION)
    return about


def check_version(about: Mapping[str, Any], known: int) -> None:
    """Require that a file says that it is of a version of its format."""
    version = about.get("version")
    what = f"has version {version!r:.20} of the format; this release reads {known}"
    require(version == known, f"it {what}: make it anew")
