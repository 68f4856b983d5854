"""What else is done to models: what libraries touch, and what a press has to get along with.

Each intervention is described once, as a scope that is entered with a model, yields what to run in
its place, and undoes the change in the way that its library offers. Each library is imported when
it is asked for.

```python
with COMPANIONS["PEFT LoRA"].scope(model) as run:
    logits = run(input_ids, past_key_values=cache).logits
```

`python -m experiments.interventions` audits those of the libraries that the running environment
has, each in a process of its own, and prints JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.loading import load_model
from press_core import attention_sites

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


# ---- torch: what it does to models by itself -----------------------------------------------------

Runs = Callable[..., Any]
"""Called as the model is."""


class _Wrapped(nn.Module):
    """In the place of a module, as FSDP puts one: runs it, and answers for its attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@contextmanager
def wrapped_layers(model: PreTrainedModel) -> Iterator[Runs]:
    """Each decoder layer inside another module."""
    layers = model.get_submodule(attention_sites(model)[0].name.rsplit(".", 2)[0])
    assert isinstance(layers, nn.ModuleList)
    plain = list(layers)
    for index, layer in enumerate(plain):
        layers[index] = _Wrapped(layer)
    try:
        yield model
    finally:
        for index, layer in enumerate(plain):
            layers[index] = layer


@contextmanager
def functional(model: PreTrainedModel) -> Iterator[Runs]:
    """Called with its weights as an argument."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    yield lambda *args, **kwargs: torch.func.functional_call(model, weights, args, kwargs)


@contextmanager
def called_inside(
    make: Callable[[], AbstractContextManager[Any]], model: PreTrainedModel
) -> Iterator[Runs]:
    """Each call inside of a context of its own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with make():
            return model(*args, **kwargs)

    yield run


@contextmanager
def gradients(model: PreTrainedModel) -> Iterator[Runs]:
    """Trained, with gradient checkpointing: answers with the gradient of all weights."""

    def run(input_ids: Tensor, **_: Any) -> Tensor:
        with torch.enable_grad():
            model.zero_grad()
            model(input_ids, labels=input_ids, use_cache=False).loss.backward()
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return torch.cat(found)

    model.train()
    model.gradient_checkpointing_enable()
    try:
        yield run
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


@contextmanager
def exported(model: PreTrainedModel) -> Iterator[Runs]:
    """Exported, without a cache: answers with the logits of the program."""

    def run(input_ids: Tensor, **_: Any) -> Tensor:
        program = torch.export.export(model, (input_ids,), {"use_cache": False}, strict=False)
        return program.module()(input_ids, use_cache=False).logits

    yield run


@contextmanager
def compiled(model: PreTrainedModel) -> Iterator[Runs]:
    """Captured by dynamo, and run operation by operation as captured."""
    torch._dynamo.reset()
    try:
        yield torch.compile(model, backend="eager")
    finally:
        torch._dynamo.reset()


# ---- all of them ---------------------------------------------------------------------------------

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

NOTHING = "nothing else"
COMPANIONS = {
    NOTHING: Intervention(nullcontext),
    "accelerate hook": Intervention(accelerate_hooks),
    "accelerate cpu offload": Intervention(accelerate_offload),
    "PEFT LoRA": Intervention(partial(peft_lora, "unload")),
    "PEFT LoRA, merged": Intervention(peft_merged),
    "quanto int8 weights": Intervention(quanto_int8),
    "wrapped layers, as FSDP does": Intervention(wrapped_layers),
    "torch.func.functional_call": Intervention(functional),
    "autocast to bfloat16": Intervention(
        partial(called_inside, partial(torch.autocast, "cpu", torch.bfloat16)), tolerance=0.05
    ),
    "inference mode": Intervention(partial(called_inside, torch.inference_mode)),
    "checkpointing and backward": Intervention(gradients, answers=True),
    "torch.export": Intervention(exported, answers=True),
    "torch.compile": Intervention(compiled, is_slow=True),
}
"""What presses are tried beside, by name."""
