"""Safetensors files whose metadata says in JSON what they hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

METADATA = "hook-or-patch"
"""Entry of a file's metadata that says, as JSON, what it holds, of which model."""

UNREADABLE: tuple[type[Exception], ...] = (
    *(SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError),
    *(AttributeError, ArithmeticError, AssertionError, EOFError, MemoryError, SyntaxError),
)
"""What reading a file may raise, whatever lies in it."""


def read(path: str | Path, group: str | None = None) -> tuple[Any, dict[str, Tensor]]:
    """What a file says about itself (an empty dictionary: nothing), and copies of its tensors.

    Args:
        group: read only the tensors whose names begin with it and a dot; None: all.

    Raises:
        Exception: one of `UNREADABLE`.
    """
    with safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
        names = [n for n in file.keys() if group is None or n.split(".")[0] == group]  # noqa: SIM118
        return about, {name: file.get_tensor(name).clone() for name in names}


def require(holds: bool, what: str) -> None:
    """Raise a `ValueError` that says `what` unless that `holds`."""
    if not holds:
        raise ValueError(what)


def named_sizes(tensors: Mapping[str, Tensor], dims: Mapping[str, str]) -> dict[str, int]:
    """The sizes of dimensions by their names; equal names have to have equal sizes.

    Args:
        dims: by tensor, the names of its dimensions, such as `"layers heads"`.

    Raises:
        ValueError: if the shapes are other ones.
    """
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        names = dims[name].split()
        if len(names) != tensor.dim() or any(
            sizes.setdefault(n, size) != size for n, size in zip(names, tensor.shape, strict=True)
        ):
            found = ", ".join(f"{n} {tuple(x.shape)}" for n, x in tensors.items())
            wanted = ", ".join(f"{n} ({dims[n]})" for n in tensors)
            raise ValueError(f"of shapes {found:.300}: they must be {wanted:.300}")
    return sizes
