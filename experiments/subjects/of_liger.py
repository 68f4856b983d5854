"""Liger-Kernel: Triton kernels in the place of functions and classes of the modeling file.

They need a GPU to run, but not to be put in place. There is no function that takes them off; the
library's own tests reload the modeling file.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from experiments.subjects import Subject


@contextmanager
def on_instance(model: PreTrainedModel) -> Iterator[None]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    yield


@contextmanager
def on_class(model: PreTrainedModel) -> Iterator[None]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    yield


@contextmanager
def on_class_and_reloaded(model: PreTrainedModel) -> Iterator[None]:
    with on_class(model):
        yield
    importlib.reload(sys.modules[type(model).__module__])


SUBJECTS = [
    Subject("apply_liger_kernel_to_llama(model)", on_instance, runs=False),
    Subject("apply_liger_kernel_to_llama()", on_class, runs=False),
    Subject("apply_liger_kernel_to_llama(), reload", on_class_and_reloaded, runs=False),
]
