"""What is said of each intervention, and of a library that offers some."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

Scope = Callable[[Any], AbstractContextManager[Any]]
"""From a model to a context manager that yields what to run in its place."""


@dataclass(frozen=True)
class Intervention:
    """Something that a library does to a model, and undoes in the way that it offers.

    Attributes:
        tolerance: largest difference of logits, as a share of the largest, that its own arithmetic
            may make where it is not repeated exactly.
        answers: whether calling it gives an answer in place of a model's output, without a cache.
        is_slow: whether a single call takes seconds.
    """

    scope: Scope
    tolerance: float = 1e-5
    answers: bool = False
    is_slow: bool = False


@dataclass(frozen=True)
class Library:
    """A library under audit.

    Attributes:
        module: what is imported.
        subjects: what is audited beside the import, by name.
        runs: whether the model can be run meanwhile, on a CPU.
    """

    module: str
    subjects: dict[str, Scope]
    runs: bool = True
