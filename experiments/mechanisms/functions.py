"""On functions that attention modules call: the attention function, and `apply_rotary_pos_emb`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import FrameType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_patch import wrap
from experiments import UserError
from experiments.mechanisms.forwards import Pruner, as_press
from press_core import attention_sites
from press_core.budget import n_kept
from press_core.presses.keys import knorm_scores
from press_core.select import gather_tokens, top_positions

_number = count()


def _evicting(attend: Any, compression_ratio: float) -> Any:
    """An attention function that evicts once `attend` has been called."""

    def attend_and_evict(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        output = attend(module, query, key, value, mask, **kwargs)
        _evict_in_place(compression_ratio, query, key, value)
        return output

    return attend_and_evict


def _evict_in_place(compression_ratio: float, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Shrink the keys and values that an attention function was given, after a prefill.

    An attention function is not given the cache. It is given the very tensors that a `DynamicCache`
    holds (without gradients), and these can be made smaller.

    Args:
        query: `(B, H, q, d)`; a forward that found its layer empty has as many queries as keys.
        key, value: `(B, H_kv, S, d)`.
    """
    n = n_kept(key.shape[2], compression_ratio)
    if query.shape[2] != key.shape[2] or n == key.shape[2]:
        return
    kept = top_positions(knorm_scores(key), n)
    for states in (key, value):
        states.data = gather_tokens(states, kept)


@as_press
@contextmanager
def attention_interface(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """The extension point of `transformers`: an attention function, registered, set as the model's.

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
        # The library registers for good, and has no way back of its own.
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]


@as_press
@contextmanager
def registry_patch(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """A reversible wrapper of `get_interface` of the registry that the model uses."""

    def get_evicting(get_interface: Any, *names: Any, **named: Any) -> Any:
        return _evicting(get_interface(*names, **named), compression_ratio)

    registries = [site.signature.interface for site in attention_sites(model)]
    with ExitStack() as patches:
        for registry in {id(registry): registry for registry in registries}.values():
            patches.callback(wrap(registry, "get_interface", get_evicting).remove)
        yield


class _Evicting(TorchFunctionMode):
    def __init__(self, model: PreTrainedModel, compression_ratio: float) -> None:
        super().__init__()
        self.compression_ratio = compression_ratio

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            _evict_in_place(self.compression_ratio, *args[:3])
        return output


function_mode = as_press(_Evicting)
"""Neither hook nor patch: a mode of torch, which sees every function that this thread calls.

It prunes after each scaled dot-product attention, of whatever model.
"""


@as_press
@contextmanager
def function_patch(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """A reversible wrapper of `apply_rotary_pos_emb` in the file of the model's attention.

    It is given queries and keys of new tokens, before the cache is: neither values nor older keys.
    What it needs it has to take from the frame of its caller, and what the prefill stored it can
    evict only when the layer is called again. The mask of that call is made already: it fits one
    new token, and not more.
    """
    pruner = Pruner(model, compression_ratio)

    def rotate(apply_rotary_pos_emb: Any, *args: Any, **kwargs: Any) -> Any:
        pruner.late(*_caller(inspect.currentframe()))
        return apply_rotary_pos_emb(*args, **kwargs)

    files = {sys.modules[type(site.module).__module__] for site in attention_sites(model)}
    with ExitStack() as patches:
        for file in files:
            patches.callback(wrap(file, "apply_rotary_pos_emb", rotate).remove)
        yield


def _caller(frame: FrameType | None) -> tuple[nn.Module, dict[str, Any]]:
    """The attention module whose forward is calling, and its local variables."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return module, frame.f_locals
        frame = frame.f_back
    raise LookupError("apply_rotary_pos_emb was not called by a module")
