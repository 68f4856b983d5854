"""On the instance: a hook and a patch as they are commonly written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from experiments.mechanisms.press import Pruner, Score, as_press
from press_core import attention_sites


@as_press
@contextmanager
def plain_hook(model: PreTrainedModel, compression_ratio: float, score: Score) -> Iterator[None]:
    """A closure as forward hook of each attention module."""
    prune = Pruner(model, compression_ratio, score).after
    with ExitStack() as hooks:
        for site in attention_sites(model):
            hooks.enter_context(site.module.register_forward_hook(prune, with_kwargs=True))
        yield


@as_press
@contextmanager
def plain_patch(model: PreTrainedModel, compression_ratio: float, score: Score) -> Iterator[None]:
    """A closure assigned to the forward of each attention module, and the old one put back."""
    pruner = Pruner(model, compression_ratio, score)

    def patched(module: nn.Module) -> Any:
        forward = module.forward
        return lambda *args, **kwargs: pruner.call(module, forward, *args, **kwargs)

    former = {site.module: site.module.forward for site in attention_sites(model)}
    try:
        for module in former:
            module.forward = patched(module)
        yield
    finally:
        for module, forward in former.items():
            module.forward = forward
