"""Shallow copies."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def copied(original: T, **attributes: Any) -> T:
    """A shallow copy with other `attributes`, in a fifth of the time of `copy.copy`.

    For a dataclass the same as `dataclasses.replace`, without calling `__post_init__`.
    """
    copy = object.__new__(type(original))
    vars(copy).update(vars(original), **attributes)
    return copy
