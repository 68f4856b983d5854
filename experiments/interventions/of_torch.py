"""torch: what it does to models by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experiments.interventions.intervention import Intervention
from press_core import attention_sites

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


COMPANIONS = {
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
"""What presses are tried beside."""
