"""What other libraries do to models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from experiments.companions.of_torch import Runs
from press_core import attention_sites


@contextmanager
def accelerate_hook(model: PreTrainedModel) -> Iterator[Runs]:
    """A hook of accelerate on each attention module, which replaces its forward."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    modules = [site.module for site in attention_sites(model)]
    for module in modules:
        add_hook_to_module(module, ModelHook())
    try:
        yield model
    finally:
        for module in modules:
            remove_hook_from_module(module)


@contextmanager
def cpu_offload(model: PreTrainedModel) -> Iterator[Runs]:
    """Weights that are there only while their module runs."""
    import accelerate
    from accelerate.hooks import remove_hook_from_submodules

    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    try:
        yield model
    finally:
        remove_hook_from_submodules(model)


@contextmanager
def _adapted(model: PreTrainedModel) -> Iterator[Any]:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = get_peft_model(model, config).eval()
    try:
        yield adapted
    finally:
        adapted.unload()


@contextmanager
def lora(model: PreTrainedModel) -> Iterator[Runs]:
    """An adapter on the query and value projections."""
    with _adapted(model) as adapted:
        yield adapted


@contextmanager
def merged_lora(model: PreTrainedModel) -> Iterator[Runs]:
    """The same, merged into the weights."""
    with _adapted(model) as adapted:
        adapted.merge_adapter()
        yield adapted
        adapted.unmerge_adapter()


@contextmanager
def int8_weights(model: PreTrainedModel) -> Iterator[Runs]:
    """Linear layers replaced by such with weights of eight bits."""
    from optimum.quanto import freeze, qint8, quantize

    former = [
        (module, dict(module._modules), dict(module._parameters)) for module in model.modules()
    ]
    quantize(model, weights=qint8)
    freeze(model)
    try:
        yield model
    finally:
        for module, children, parameters in former:
            module._modules.update(children)
            module._parameters.update(parameters)
