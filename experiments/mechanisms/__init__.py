"""One press, installed at every level at which a transformer can be modified.

```python
press = MECHANISMS["class patch"](0.5)
with press(model):
    model(input_ids, past_key_values=cache)
```

All evict the keys of largest norm after the prefill of each layer. `hooks` and `patches` are the
two mechanisms of this project. The others are alternatives in their simplest form: reversible,
unless the name says otherwise, and without a check of which model is calling, so that tests show
how far the mechanism itself reaches.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hooks_impl
import patch_impl
from attention_patch import wrap
from experiments import UserError
from press_core import attention_sites
from press_core.budget import n_kept
from press_core.engine import after_attention
from press_core.forward import Arguments, Forward, Progress
from press_core.observing import AttentionPass
from press_core.presses.keys import knorm_scores
from press_core.scope import bound_to
from press_core.select import gather_tokens, top_positions

Opens = Callable[[PreTrainedModel], AbstractContextManager[Any]]
"""`press(model)`: the interface of a press, for any mechanism."""


def as_press(scope: Callable[[PreTrainedModel, float], Iterator[None]]) -> Callable[[float], Opens]:
    """Turn a generator `scope(model, compression_ratio)` into `press(ratio)(model)`."""
    opened = contextmanager(scope)
    return lambda compression_ratio: lambda model: opened(model, compression_ratio)


class Pruner:
    """Prunes layers that attention modules have filled: of the model, and of others of its class.

    Only this class uses the internals of presses.
    """

    def __init__(self, model: PreTrainedModel, compression_ratio: float) -> None:
        # Bound, but never opened: the mechanism under test calls `after`.
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
            forward.acting[self.scope] = Progress()  # it was a prefill
            press = self.scope.press
            after_attention(AttentionPass(self.scope, press, forward, site, given, output, None))


# ---- on the forward of each attention module -----------------------------------------------------


@as_press
def plain_hook(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """A closure as forward hook of each attention module; deep copies of the model share it."""
    pruner = Pruner(model, compression_ratio)

    with ExitStack() as hooks:
        for site in attention_sites(model):
            register = site.module.register_forward_hook
            hooks.enter_context(register(lambda *call: pruner.after(*call), with_kwargs=True))
        yield


@as_press
def plain_patch(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """A closure assigned to `forward` of each attention module; the old one is restored."""
    pruner = Pruner(model, compression_ratio)
    former = {site.module: site.module.forward for site in attention_sites(model)}

    def patched(module: nn.Module, forward: Any) -> Any:
        @wraps(forward)
        def pruned(*args: Any, **kwargs: Any) -> Any:
            return pruner.call(module, forward, *args, **kwargs)

        return pruned

    try:
        for module, forward in former.items():
            module.forward = patched(module, forward)
        yield
    finally:
        for module, forward in former.items():
            module.forward = forward


# ---- on the forward of their class ---------------------------------------------------------------


@as_press
def class_patch(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """A reversible wrapper of `forward` of each attention class of the model."""
    pruner = Pruner(model, compression_ratio)

    def layer(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return pruner.call(_instance(forward), forward, *args, **kwargs)

    with ExitStack() as patches:
        for cls in _attention_classes(model):
            patches.callback(wrap(cls, "forward", layer).remove)
        yield


def _instance(forward: Any) -> nn.Module:
    """The module that a bound forward belongs to, below partials of other wrappers."""
    while isinstance(forward, partial):
        forward = forward.args[0]
    return forward.__self__


@as_press
def permanent_class_patch(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """Assign `forward` of the class permanently, as code published with papers does.

    The negative control: leaving the scope undoes nothing, so nothing may run after it in the
    process.
    """
    pruner = Pruner(model, compression_ratio)

    def patched(forward: Any) -> Any:
        @wraps(forward)  # by which the probe knows the class again when another scope is opened
        def new_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return pruner.call(self, partial(forward, self), *args, **kwargs)

        return new_forward

    for cls in _attention_classes(model):
        cls.forward = patched(cls.forward)
    yield


def _attention_classes(model: PreTrainedModel) -> list[Any]:
    return list(dict.fromkeys(type(site.module) for site in attention_sites(model)))


# ---- on the attention function, which attention modules call -------------------------------------

_number = count()


def _evicting(attend: Any, compression_ratio: float) -> Any:
    """An attention function that evicts after calling `attend` in a prefill.

    An attention function does not receive the cache. It receives the tensors that a `DynamicCache`
    holds (without gradients), and can shrink these in place.
    """

    def attend_and_evict(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        output = attend(module, query, key, value, mask, **kwargs)
        n = n_kept(key.shape[2], compression_ratio)
        if query.shape[2] == key.shape[2] != n:  # as many queries as keys: it is a prefill
            kept = top_positions(knorm_scores(key), n)
            for states in (key, value):
                states.data = gather_tokens(states, kept)
        return output

    return attend_and_evict


@as_press
def attention_interface(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """The extension point of `transformers`: register an attention function and set it on a model.

    Raises:
        UserError: for eager attention, whose function is not in the registry.
    """
    former = model.config._attn_implementation
    if former not in AttentionInterface._global_mapping:
        raise UserError(f"{former!r} attention has no function in the registry; load with sdpa")
    name = f"{former}_evicting_{next(_number)}"
    attend = ALL_ATTENTION_FUNCTIONS[former]
    AttentionInterface.register(name, _evicting(attend, compression_ratio))
    AttentionMaskInterface.register(name, AttentionMaskInterface._global_mapping[former])
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(former)
        # The library has no method that removes a registered function.
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]


@as_press
def registry_patch(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """A reversible wrapper of `get_interface` of the registry that the model uses."""

    def get_evicting(get_interface: Any, *names: Any, **named: Any) -> Any:
        return _evicting(get_interface(*names, **named), compression_ratio)

    registries = [site.signature.interface for site in attention_sites(model)]
    with ExitStack() as patches:
        for registry in {id(registry): registry for registry in registries}.values():
            patches.callback(wrap(registry, "get_interface", get_evicting).remove)
        yield


# ---- clean-up of changes that a mechanism leaves in the process ----------------------------------


@contextmanager
def contained(model: PreTrainedModel) -> Iterator[None]:
    """Restore the model's classes and the attention registries after the block.

    Changes of `model` itself remain: do not use it afterwards.
    """
    classes = {type(module) for module in model.modules()}
    own = [cls for cls in classes if cls.__module__.startswith("transformers.models.")]
    attributes = {cls: dict(vars(cls)) for cls in own}
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    with patch.dict(functions), patch.dict(masks):
        try:
            yield
        finally:
            for cls, former in attributes.items():
                for name, value in list(vars(cls).items()):
                    if name not in former:
                        delattr(cls, name)
                    elif former[name] is not value:
                        setattr(cls, name, former[name])


# ---- all of them ---------------------------------------------------------------------------------

MECHANISMS: dict[str, Callable[[float], Opens]] = {
    "hooks": hooks_impl.KnormPress,
    "plain hook": plain_hook,
    "patches": patch_impl.KnormPress,
    "plain instance patch": plain_patch,
    "attention interface": attention_interface,
    "registry patch": registry_patch,
    "class patch": class_patch,
    "permanent class patch": permanent_class_patch,
}
"""From a compression ratio to a press, by name, from the narrowest reach to the widest."""

OURS = ("hooks", "patches")
"""The two mechanisms of this project."""

TRIED: dict[str, Opens] = {
    **{name: make(0.5) for name, make in MECHANISMS.items()},
    "hooks, SnapKV": hooks_impl.SnapKVPress(0.5, window_size=4),
    "hooks, AdaKV": hooks_impl.AdaKVPress(hooks_impl.KnormPress(0.5)),
    "patches, SnapKV": patch_impl.SnapKVPress(0.5, window_size=4),
    "patches, AdaKV": patch_impl.AdaKVPress(patch_impl.KnormPress(0.5)),
}
"""Every mechanism at ratio 0.5, and ours also with presses that read queries or are head-wise."""
