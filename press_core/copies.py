"""Shallow copies."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def copied(original: T, **attributes: Any) -> T:
    """What `copy.copy` gives, with other `attributes`, in a fifth of the time.

    Of a dataclass this is `dataclasses.replace`, without another `__post_init__`.
    """
    copy = object.__new__(type(original))
    vars(copy).update(vars(original), **attributes)
    return copy
