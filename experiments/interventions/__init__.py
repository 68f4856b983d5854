"""Changes that other libraries make to models: audited on their own, and combined with presses.

Each intervention is a scope that takes a model, yields the object to run instead of it, and undoes
the change with the means that its library offers. A library is imported only when its scope is
entered.

```python
with COMPANIONS["PEFT LoRA"].scope(model) as run:
    logits = run(input_ids, past_key_values=cache).logits
```

`python -m experiments.interventions` audits the libraries that are installed in the running
environment, each subject in a separate process, and prints JSON.
"""

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
"""From a model to a context manager that yields the object to run instead of it."""


@dataclass(frozen=True)
class Intervention:
    """A reversible change that a library makes to a model.

    Attributes:
        tolerance: allowed difference of logits, as a share of the largest logit, if its arithmetic
            is not repeated exactly.
        answers: whether calling it returns a tensor instead of a model output, without a cache.
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
        module: the Python module to import.
        subjects: by name, the scopes that are audited besides the import.
        runs: whether the model can run on a CPU within these scopes.
    """

    module: str
    subjects: dict[str, Scope]
    runs: bool = True


# ---- kvpress: hooks; head-wise presses also patch the attention registry -------------------------


def kvpress(is_headwise: bool, model: PreTrainedModel) -> Any:
    from kvpress import AdaKVPress, KnormPress

    press = KnormPress(0.5)
    return (AdaKVPress(press) if is_headwise else press)(model)


# ---- accelerate: a wrapper of each module's forward, which loads offloaded weights ---------------


@contextmanager
def accelerate_hooks(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Add a hook that does nothing to the attention modules, and remove it."""
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
    """Offload the weights, which are loaded for each call of a module."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    cpu_offload(model, execution_device=torch.device("cpu"))
    try:
        yield model
    finally:
        remove_hook_from_submodules(model)


# ---- PEFT: low-rank adapters that replace projections --------------------------------------------

_PROJECTIONS = {"q_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"}
"""Names of query and value projections in all families."""


@contextmanager
def peft_lora(leave: str, model: PreTrainedModel) -> Iterator[Any]:
    """LoRA on the query and value projections, removed by the method called `leave`."""
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
    """LoRA merged into the weights, and unmerged at the end."""
    with peft_lora("unload", model) as adapters:
        adapters.merge_adapter()
        yield adapters
        adapters.unmerge_adapter()


# ---- quanto, which cannot undo a quantization: modules and weights are restored here -------------


@contextmanager
def quanto_int8(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Replace linear layers with quantized ones, whose weights have eight bits."""
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
    """Replace functions and classes of the modeling file with Liger-Kernel's Triton kernels.

    The kernels need a GPU to run, but not to be installed.

    Args:
        on: the `model` whose modules are changed; without it, the classes of all Llama models are.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(**on)
    yield


@contextmanager
def transformer_lens(model: PreTrainedModel) -> Iterator[Any]:
    """TransformerLens: a bridge with a hook point for every component of the model."""
    from transformer_lens.model_bridge import TransformerBridge

    _, tokenizer = load_model("facts-llama")
    yield TransformerBridge.boot_transformers(
        "local", hf_model=model, tokenizer=tokenizer, device="cpu"
    )


@contextmanager
def nnsight(model: PreTrainedModel) -> Iterator[Any]:
    """NNsight: a wrapper that can run code inside the model's forward."""
    from nnsight import NNsight

    wrapper = NNsight(model)  # a reference, so that it lives as long as the block
    yield wrapper


# ---- torch ---------------------------------------------------------------------------------------


class _Wrapped(nn.Module):
    """A wrapper module like FSDP's: calls the wrapped module and forwards attribute access."""

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
def wrapped_layers(model: PreTrainedModel) -> Iterator[Any]:
    """Wrap each decoder layer in another module."""
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
def functional(model: PreTrainedModel) -> Iterator[Any]:
    """Call the model with its weights as an argument."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    yield lambda *args, **kwargs: torch.func.functional_call(model, weights, args, kwargs)


@contextmanager
def called_inside(
    make: Callable[[], AbstractContextManager[Any]], model: PreTrainedModel
) -> Iterator[Any]:
    """Enter a new context for each call of the model."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with make():
            return model(*args, **kwargs)

    yield run


@contextmanager
def gradients(model: PreTrainedModel) -> Iterator[Any]:
    """Train with gradient checkpointing; a call returns the gradient of all weights."""

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
def exported(model: PreTrainedModel) -> Iterator[Any]:
    """Export the model without a cache; a call returns the logits of the exported program."""

    def run(input_ids: Tensor, **_: Any) -> Tensor:
        program = torch.export.export(model, (input_ids,), {"use_cache": False}, strict=False)
        return program.module()(input_ids, use_cache=False).logits

    yield run


@contextmanager
def compiled(model: PreTrainedModel) -> Iterator[Any]:
    """Compile with dynamo and the eager backend, which runs the captured graph op by op."""
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
"""The audited libraries, by their name on PyPI."""

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
"""The interventions that presses are combined with, by name."""
