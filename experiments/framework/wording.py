"""Errors in one line, and times in two words."""

from __future__ import annotations

from typing import Any


def in_one_line(error: BaseException) -> str:
    """An error as a traceback ends with it, without line breaks: `"KeyError: 'gone'"`."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def refused(error: Any, whole: str) -> str:
    """What pydantic finds wrong, such as `samples is 'many'; input should be a valid integer`.

    Args:
        error: one of `ValidationError.errors()`.
        whole: what is wrong where no part of it is named.
    """
    place = ".".join(part for part in error["loc"] if isinstance(part, str)) or whole
    reason = error["msg"].removeprefix("Value error, ")
    said = f"{place} is {error['input']!r:.200}; {reason[0].lower()}{reason[1:]}"
    return said if said.isprintable() else ascii(said)[1:-1]


def about_seconds(seconds: float | None) -> str:
    """How long that is, as people say it: `"12 min"`; None: not known."""
    if seconds is None:
        return "not known"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
