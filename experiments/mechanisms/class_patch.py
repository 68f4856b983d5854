"""On the class: for every instance of it, reversibly and for good."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attention_patch import wrap
from experiments.mechanisms.press import Pruner, Score, as_press
from press_core import attention_sites


@as_press
@contextmanager
def class_patch(model: PreTrainedModel, compression_ratio: float, score: Score) -> Iterator[None]:
    """A reversible wrapper of the forward of each attention class of the model."""
    pruner = Pruner(model, compression_ratio, score)

    def layer(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return pruner.call(_instance(forward), forward, *args, **kwargs)

    with ExitStack() as patches:
        for cls in _attention_classes(model):
            patches.callback(wrap(cls, "forward", layer).remove)
        yield


def _instance(forward: Any) -> nn.Module:
    """Whose forward it is, below the layers of others."""
    while isinstance(forward, partial):
        forward = forward.args[0]
    module: nn.Module = forward.__self__
    return module


@as_press
@contextmanager
def permanent_class_patch(
    model: PreTrainedModel, compression_ratio: float, score: Score
) -> Iterator[None]:
    """What the codes published with papers do: assign `forward` of the class, and leave it so.

    The negative control: leaving the scope changes nothing. Run it where nothing comes after it.
    """
    pruner = Pruner(model, compression_ratio, score)

    def patched(forward: Any) -> Any:
        def new_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return pruner.call(self, partial(forward, self), *args, **kwargs)

        new_forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        return new_forward

    for cls in _attention_classes(model):
        cls.forward = patched(cls.forward)
    yield


def _attention_classes(model: PreTrainedModel) -> list[Any]:
    return list(dict.fromkeys(type(site.module) for site in attention_sites(model)))
