"""On the forward of attention modules: of each one, or of their class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

import patch_impl
from attention_patch import wrap
from press_core import attention_sites
from press_core.engine import after_attention
from press_core.forward import Arguments, Forward, Progress
from press_core.observing import Passed
from press_core.scope import bound_to

Opens = Callable[[PreTrainedModel], AbstractContextManager[Any]]
"""`press(model)`: what a press is to its user, however it is installed."""


def as_press(scope: Callable[[PreTrainedModel, float], Iterator[None]]) -> Callable[[float], Opens]:
    """`scope(model, compression_ratio)`, which yields once, as `press(ratio)(model)`."""
    opened = contextmanager(scope)
    return lambda compression_ratio: lambda model: opened(model, compression_ratio)


class Pruner:
    """Prunes what attention modules have cached: of the model, and of all others of its class.

    What is borrowed from the machinery of presses is borrowed here.
    """

    def __init__(self, model: PreTrainedModel, compression_ratio: float) -> None:
        # Bound, but never opened: what the mechanism finds, it prunes.
        self.scope = bound_to(patch_impl.KnormPress(compression_ratio), model)

    def call(self, module: nn.Module, call_next: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an attention module's forward, `call_next`, and prune the layer it has filled."""
        output = call_next(*args, **kwargs)
        self.after(module, args, kwargs, output)
        return output

    def after(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Prune the layer that a forward has filled."""
        site = replace(self.scope.sites[0], module=module, layer_idx=module.layer_idx)
        given = Arguments(args, kwargs, site.signature.parameters)
        cache, hidden_states = given.get(site.signature.cache_name), given.get("hidden_states")
        of_decoder = given.replace(past_key_values=cache, inputs_embeds=hidden_states)
        forward = Forward(module, of_decoder)
        if cache is not None and cache.get_seq_length(site.layer_idx) == forward.n_tokens:
            forward.progress[self.scope] = Progress()  # it was a prefill
            passed = Passed(forward, site, given, output, None)
            after_attention(self.scope, self.scope.press, passed)


# ---- of each module ------------------------------------------------------------------------------


@as_press
def plain_hook(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """A closure as forward hook of each attention module, which a deep copy shares."""
    pruner = Pruner(model, compression_ratio)

    with ExitStack() as hooks:
        for site in attention_sites(model):
            register = site.module.register_forward_hook
            hooks.enter_context(register(lambda *call: pruner.after(*call), with_kwargs=True))
        yield


@as_press
def plain_patch(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """A closure assigned to the forward of each attention module, and the old one put back."""
    pruner = Pruner(model, compression_ratio)
    former = {site.module: site.module.forward for site in attention_sites(model)}

    def patched(module: nn.Module, forward: Any) -> Any:
        return lambda *args, **kwargs: pruner.call(module, forward, *args, **kwargs)

    try:
        for module, forward in former.items():
            module.forward = patched(module, forward)
        yield
    finally:
        for module, forward in former.items():
            module.forward = forward


# ---- of their class ------------------------------------------------------------------------------


@as_press
def class_patch(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """A reversible wrapper of the forward of each attention class of the model."""
    pruner = Pruner(model, compression_ratio)

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
    return forward.__self__


@as_press
def permanent_class_patch(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """What the codes published with papers do: assign `forward` of the class, and leave it so.

    The negative control: leaving the scope changes nothing. Run it where nothing comes after it.
    """
    pruner = Pruner(model, compression_ratio)

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
