"""What libraries do to models, and undo as they offer; each is imported when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from experiments.interventions.intervention import Intervention, Library
from experiments.loading import load_model
from press_core import attention_sites

# ---- kvpress: hooks, for head-wise presses with the help of the attention registry ---------------


def kvpress_knorm(model: PreTrainedModel) -> Any:
    from kvpress import KnormPress

    return KnormPress(0.5)(model)


def kvpress_adakv(model: PreTrainedModel) -> Any:
    from kvpress import AdaKVPress, KnormPress

    return AdaKVPress(KnormPress(0.5))(model)


@contextmanager
def interrupted(scope: AbstractContextManager[Any]) -> Iterator[None]:
    """`scope`, left by a `KeyboardInterrupt`."""
    with suppress(KeyboardInterrupt), scope:
        yield
        raise KeyboardInterrupt


# ---- accelerate: modules whose weights live elsewhere, brought in by a wrapper of each forward ---


@contextmanager
def accelerate_hooks(
    find: Callable[[PreTrainedModel], list[nn.Module]], model: PreTrainedModel
) -> Iterator[PreTrainedModel]:
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
def accelerate_weights(how: str, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Weights that are brought to their modules call by call: "dispatched" or "offloaded"."""
    from accelerate import cpu_offload, dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    if how == "dispatched":
        parts = ("embed_tokens", "norm", "rotary_emb", "layers.0", "layers.1")
        device_map = dict.fromkeys((*(f"model.{part}" for part in parts), "lm_head"), "cpu")
        dispatch_model(model, device_map, main_device="cpu", force_hooks=True)
    else:
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
def liger(on: str, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Liger-Kernel's Triton kernels in the place of functions and classes of the modeling file.

    They need a GPU to run, but not to be put in place. The library's own tests reload the file.

    Args:
        on: "instance", "class", or "reloaded": the class, whose file is reloaded afterwards.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(**({"model": model} if on == "instance" else {}))
    yield model
    if on == "reloaded":
        importlib.reload(sys.modules[type(model).__module__])


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


LIBRARIES = (
    Library(
        "kvpress",
        "kvpress",
        {
            "KnormPress": kvpress_knorm,
            "KnormPress, interrupted": lambda model: interrupted(kvpress_knorm(model)),
            "AdaKVPress": kvpress_adakv,
        },
    ),
    Library(
        "accelerate",
        "accelerate",
        {
            "add_hook_to_module, remove_hook_from_module": partial(
                accelerate_hooks, lambda model: [model]
            ),
            "dispatch_model, remove_hook_from_submodules": partial(
                accelerate_weights, "dispatched"
            ),
            "cpu_offload, remove_hook_from_submodules": partial(accelerate_weights, "offloaded"),
        },
    ),
    Library(
        "peft",
        "peft",
        {f"LoRA, {leave}": partial(peft_lora, leave) for leave in ("unload", "merge_and_unload")},
    ),
    Library(
        "liger-kernel",
        "liger_kernel.transformers",
        {
            "apply_liger_kernel_to_llama(model)": partial(liger, "instance"),
            "apply_liger_kernel_to_llama()": partial(liger, "class"),
            "apply_liger_kernel_to_llama(), reload": partial(liger, "reloaded"),
        },
        runs=False,
    ),
    Library("transformer-lens", "transformer_lens", {"TransformerBridge": transformer_lens}),
    Library("nnsight", "nnsight", {"NNsight": nnsight}),
)
"""What is audited."""

COMPANIONS = {
    "accelerate hook": Intervention(partial(accelerate_hooks, _attention)),
    "accelerate cpu offload": Intervention(partial(accelerate_weights, "offloaded")),
    "PEFT LoRA": Intervention(partial(peft_lora, "unload")),
    "PEFT LoRA, merged": Intervention(peft_merged),
    "quanto int8 weights": Intervention(quanto_int8),
}
"""What presses are tried beside."""
