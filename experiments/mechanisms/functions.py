"""On the attention function, which attention modules call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_patch import wrap
from experiments import UserError
from experiments.mechanisms.forwards import as_press
from press_core import attention_sites
from press_core.budget import n_kept
from press_core.presses.keys import knorm_scores
from press_core.select import gather_tokens, top_positions

_number = count()


def _evicting(attend: Any, compression_ratio: float) -> Any:
    """An attention function that evicts once `attend` has been called in a prefill.

    An attention function is not given the cache. It is given the very tensors that a `DynamicCache`
    holds (without gradients), and these can be made smaller.
    """

    def attend_and_evict(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        output = attend(module, query, key, value, mask, **kwargs)
        n = n_kept(key.shape[2], compression_ratio)
        if query.shape[2] == key.shape[2] != n:  # as many queries as keys: the layer was empty
            kept = top_positions(knorm_scores(key), n)
            for states in (key, value):
                states.data = gather_tokens(states, kept)
        return output

    return attend_and_evict


@as_press
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
def registry_patch(model: PreTrainedModel, compression_ratio: float) -> Iterator[None]:
    """A reversible wrapper of `get_interface` of the registry that the model uses."""

    def get_evicting(get_interface: Any, *names: Any, **named: Any) -> Any:
        return _evicting(get_interface(*names, **named), compression_ratio)

    registries = [site.signature.interface for site in attention_sites(model)]
    with ExitStack() as patches:
        for registry in {id(registry): registry for registry in registries}.values():
            patches.callback(wrap(registry, "get_interface", get_evicting).remove)
        yield
