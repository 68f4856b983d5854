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

from experiments.interventions.intervention import Intervention


@contextmanager
def on_instance(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    yield model


@contextmanager
def on_class(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    yield model


@contextmanager
def on_class_and_reloaded(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    with on_class(model):
        yield model
    importlib.reload(sys.modules[type(model).__module__])


INTERVENTIONS = (
    Intervention(on_instance, "apply_liger_kernel_to_llama(model)", runs=False),
    Intervention(on_class, "apply_liger_kernel_to_llama()", runs=False),
    Intervention(on_class_and_reloaded, "apply_liger_kernel_to_llama(), reload", runs=False),
)
