"""accelerate: modules whose weights live elsewhere, brought in by a wrapper of each forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from experiments.subjects import Subject


@contextmanager
def hooked(model: PreTrainedModel) -> Iterator[None]:
    """A hook that does nothing, on the model and off again."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    add_hook_to_module(model, ModelHook())
    yield
    remove_hook_from_module(model)


@contextmanager
def dispatched(model: PreTrainedModel) -> Iterator[None]:
    """The weights of one layer in memory, and brought to it call by call."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "cpu", "lm_head": "cpu"}
    dispatch_model(model, device_map, main_device="cpu", force_hooks=True)
    yield
    remove_hook_from_submodules(model)


@contextmanager
def offloaded(model: PreTrainedModel) -> Iterator[None]:
    """All weights in a dictionary, and brought to their modules call by call."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    cpu_offload(model, execution_device="cpu")
    yield
    remove_hook_from_submodules(model)


SUBJECTS = [
    Subject("add_hook_to_module, remove_hook_from_module", hooked),
    Subject("dispatch_model, remove_hook_from_submodules", dispatched),
    Subject("cpu_offload, remove_hook_from_submodules", offloaded),
]
