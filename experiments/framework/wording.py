"""How tables say what is not a number."""

from __future__ import annotations


def in_one_line(error: BaseException) -> str:
    """An error as a traceback ends with it, without line breaks: `"KeyError: 'gone'"`."""
    return " ".join(f"{type(error).__name__}: {error}".split())
