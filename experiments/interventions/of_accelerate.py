"""accelerate: modules whose weights live elsewhere, brought in by a wrapper of each forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from experiments.interventions.intervention import Intervention
from press_core import attention_sites

Find = Callable[[PreTrainedModel], list[nn.Module]]


@contextmanager
def hooked(find: Find, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """A hook that does nothing, on the modules that `find` gives and off again."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    modules = find(model)
    for module in modules:
        add_hook_to_module(module, ModelHook())
    try:
        yield model
    finally:
        for module in modules:
            remove_hook_from_module(module)


def _attention(model: PreTrainedModel) -> list[nn.Module]:
    return [site.module for site in attention_sites(model)]


@contextmanager
def offloaded(start: Callable[[Any], Any], model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Weights that are brought to their modules call by call, as `start` has arranged."""
    from accelerate.hooks import remove_hook_from_submodules

    start(model)
    try:
        yield model
    finally:
        remove_hook_from_submodules(model)


def _dispatch(model: PreTrainedModel) -> None:
    from accelerate import dispatch_model

    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "cpu", "lm_head": "cpu"}
    dispatch_model(model, device_map, main_device="cpu", force_hooks=True)


def _offload(model: PreTrainedModel) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


INTERVENTIONS = (
    Intervention(
        partial(hooked, lambda model: [model]), "add_hook_to_module, remove_hook_from_module"
    ),
    Intervention(partial(hooked, _attention), companion="accelerate hook"),
    Intervention(partial(offloaded, _dispatch), "dispatch_model, remove_hook_from_submodules"),
    Intervention(
        partial(offloaded, _offload),
        "cpu_offload, remove_hook_from_submodules",
        "accelerate cpu offload",
    ),
)
