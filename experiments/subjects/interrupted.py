"""A way of leaving a scope."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any


@contextmanager
def interrupted(scope: AbstractContextManager[Any]) -> Iterator[None]:
    """`scope`, left by a `KeyboardInterrupt`."""
    with suppress(KeyboardInterrupt), scope:
        yield
        raise KeyboardInterrupt
