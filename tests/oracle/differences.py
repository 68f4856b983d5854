"""Where this repository keeps something else than kvpress on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import hooks_impl

Test = TypeVar("Test", bound=Callable[..., None])


class Difference(NamedTuple):
    """One deliberate difference.

    Attributes:
        presses: what it is about.
        kvpress: what kvpress does.
        here: what this repository does instead, and why where that is not plain.
        test: name of the test that shows it.
    """

    presses: str
    kvpress: str
    here: str
    test: str


DIFFERENCES: list[Difference] = []


def difference(*, presses: str, kvpress: str, here: str) -> Callable[[Test], Test]:
    """Marks a test as the one that shows a difference, and notes the difference."""

    def mark(test: Test) -> Test:
        DIFFERENCES.append(Difference(presses, kvpress, here, test.__name__))
        return test

    return mark


NOT_IN_KVPRESS = {
    "DropKVPress": "proposed to it",
    "H2OPress": "heavy hitters while decoding",
    "RKVPress": "for reasoning models while decoding",
    "EveryTurnPress": "every turn of a conversation pruned again",
    "StreamingLLMDecodingPress": "a bounded cache for endless generation",
}
"""Presses without an oracle."""

assert NOT_IN_KVPRESS.keys() <= hooks_impl.PRESSES.keys()
