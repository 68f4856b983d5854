"""On the instance: a hook and a patch as they are commonly written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from experiments.mechanisms.press import (
    PatchPress,
    Score,
    as_press,
    call_and_prune,
    observing,
    prune_after,
)
from press_core import attention_sites


@as_press
@contextmanager
def plain_hook(model: PreTrainedModel, compression_ratio: float, score: Score) -> Iterator[None]:
    """A closure as forward hook of each attention module."""
    press = PatchPress(compression_ratio, score)

    def prune(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        prune_after(*observing(press, module, args, kwargs), output)

    with ExitStack() as hooks:
        for site in attention_sites(model):
            hooks.enter_context(site.module.register_forward_hook(prune, with_kwargs=True))
        yield


@as_press
@contextmanager
def plain_patch(model: PreTrainedModel, compression_ratio: float, score: Score) -> Iterator[None]:
    """A closure assigned to the forward of each attention module, and the old one put back."""
    press = PatchPress(compression_ratio, score)

    def patched(module: nn.Module) -> Any:
        forward = module.forward
        return lambda *args, **kwargs: call_and_prune(press, module, forward, *args, **kwargs)

    former = {site.module: site.module.forward for site in attention_sites(model)}
    try:
        for module in former:
            module.forward = patched(module)
        yield
    finally:
        for module, forward in former.items():
            module.forward = forward
