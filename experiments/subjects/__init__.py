"""Real libraries under audit: what they touch, and what they leave.

`python -m experiments.subjects` audits those that the running environment has, each in a process of
its own, and prints JSON. `experiments.questions.intrusiveness` runs that in the environments that have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class Subject:
    """Something that a library does to a model.

    Attributes:
        name: what it does.
        make: from a model to what `audit` takes: a context manager, or a callable.
        runs: whether the model can be run meanwhile, on a CPU.
    """

    name: str
    make: Callable[[PreTrainedModel], Any]
    runs: bool = True


@dataclass(frozen=True)
class Library:
    """A library under audit.

    Attributes:
        distribution: its name on PyPI.
        module: what is imported.
        file: module of this package that holds its `SUBJECTS`, importable without the library.
    """

    distribution: str
    module: str
    file: str

    @property
    def subjects(self) -> list[Subject]:
        """The import of the library, and what else is audited."""
        found: list[Subject] = import_module(f"{__name__}.{self.file}").SUBJECTS
        return [Subject("import", lambda _: lambda: import_module(self.module)), *found]


LIBRARIES = (
    Library("kvpress", "kvpress", "of_kvpress"),
    Library("accelerate", "accelerate", "of_accelerate"),
    Library("peft", "peft", "of_peft"),
    Library("liger-kernel", "liger_kernel.transformers", "of_liger"),
    Library("transformer-lens", "transformer_lens", "of_transformer_lens"),
    Library("nnsight", "nnsight", "of_nnsight"),
)
