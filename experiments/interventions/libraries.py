"""What libraries do to models, and undo as they offer; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from experiments.interventions.intervention import Intervention, Library
from experiments.loading import load_model
from press_core import attention_sites

# ---- kvpress: hooks, for head-wise presses with the help of the attention registry ---------------


def kvpress(is_headwise: bool, model: PreTrainedModel) -> Any:
    from kvpress import AdaKVPress, KnormPress

    press = KnormPress(0.5)
    return (AdaKVPress(press) if is_headwise else press)(model)


# ---- accelerate: modules whose weights live elsewhere, brought in by a wrapper of each forward ---


@contextmanager
def accelerate_hooks(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """A hook that does nothing, on the attention modules and off again."""
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
def accelerate_offload(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Weights that are brought to their modules call by call."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    cpu_offload(model, execution_device=torch.device("cpu"))
    try:
        yield model
    finally:
        remove_hook_from_submodules(model)


# ---- PEFT: low-rank adapters in the place of projections -----------------------------------------

_PROJECTIONS = {"q_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"}
"""What makes queries and values, by family."""


@contextmanager
def peft_lora(leave: str, model: PreTrainedModel) -> Iterator[Any]:
    """LoRA on what makes queries and values, taken off by the method `leave`."""
    from peft import LoraConfig, get_peft_model

    projections = {name.rpartition(".")[2] for name, _ in model.named_modules()} & _PROJECTIONS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=sorted(projections), init_lora_weights=False)
        adapters = get_peft_model(model, config).eval()
    try:
        yield adapters
    finally:
        getattr(adapters, leave)()


@contextmanager
def peft_merged(model: PreTrainedModel) -> Iterator[Any]:
    """The same, merged into the weights and taken out of them again."""
    with peft_lora("unload", model) as adapters:
        adapters.merge_adapter()
        yield adapters
        adapters.unmerge_adapter()


# ---- quanto, which offers no way back: what was there is put back by hand ------------------------


@contextmanager
def quanto_int8(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Linear layers replaced by ones whose weights have eight bits."""
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


# ---- libraries without a function that undoes what they do ---------------------------------------


@contextmanager
def liger(**on: Any) -> Iterator[None]:
    """Liger-Kernel's Triton kernels in the place of functions and classes of the modeling file.

    They need a GPU to run, but not to be put in place.

    Args:
        on: the `model` whose modules are changed; nothing: the class of all Llamas.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(**on)
    yield


@contextmanager
def transformer_lens(model: PreTrainedModel) -> Iterator[Any]:
    """TransformerLens: every component of a model behind a hook point of its own."""
    from transformer_lens.model_bridge import TransformerBridge

    _, tokenizer = load_model("facts-llama")
    yield TransformerBridge.boot_transformers(
        "local", hf_model=model, tokenizer=tokenizer, device="cpu"
    )


@contextmanager
def nnsight(model: PreTrainedModel) -> Iterator[Any]:
    """A model wrapped so that code can be run inside of its forward."""
    from nnsight import NNsight

    wrapper = NNsight(model)  # which has to live as long as the block
    yield wrapper


LIBRARIES = {
    "kvpress": Library(
        "kvpress", {"KnormPress": partial(kvpress, False), "AdaKVPress": partial(kvpress, True)}
    ),
    "accelerate": Library(
        "accelerate",
        {
            "add_hook_to_module, remove_hook_from_module": accelerate_hooks,
            "cpu_offload, remove_hook_from_submodules": accelerate_offload,
        },
    ),
    "peft": Library(
        "peft",
        {f"LoRA, {leave}": partial(peft_lora, leave) for leave in ("unload", "merge_and_unload")},
    ),
    "liger-kernel": Library(
        "liger_kernel.transformers",
        {
            "apply_liger_kernel_to_llama(model)": lambda model: liger(model=model),
            "apply_liger_kernel_to_llama()": lambda _: liger(),
        },
        runs=False,
    ),
    "transformer-lens": Library("transformer_lens", {"TransformerBridge": transformer_lens}),
    "nnsight": Library("nnsight", {"NNsight": nnsight}),
}
"""What is audited, by name on PyPI."""

COMPANIONS = {
    "accelerate hook": Intervention(accelerate_hooks),
    "accelerate cpu offload": Intervention(accelerate_offload),
    "PEFT LoRA": Intervention(partial(peft_lora, "unload")),
    "PEFT LoRA, merged": Intervention(peft_merged),
    "quanto int8 weights": Intervention(quanto_int8),
}
"""What presses are tried beside."""
