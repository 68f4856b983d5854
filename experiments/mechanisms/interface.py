"""The extension point of `transformers`: an attention function of one's own, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from experiments import UserError
from experiments.mechanisms.press import Score, as_press, evict_in_place

_number = count()


@as_press
@contextmanager
def attention_interface(
    model: PreTrainedModel, compression_ratio: float, score: Score
) -> Iterator[None]:
    """Register a function that prunes after attention, and set it as the model's.

    Raises:
        UserError: for eager attention, whose function is not in the registry.
    """
    former = model.config._attn_implementation
    if former not in AttentionInterface._global_mapping:
        raise UserError(f"{former!r} attention has no function in the registry; load with sdpa")
    attend = ALL_ATTENTION_FUNCTIONS[former]

    def attend_and_evict(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        output = attend(module, query, key, value, mask, **kwargs)
        evict_in_place(compression_ratio, score, query, key, value)
        return output

    name = f"{former}_evicting_{next(_number)}"
    AttentionInterface.register(name, attend_and_evict)
    AttentionMaskInterface.register(name, AttentionMaskInterface._global_mapping[former])
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(former)
        # The library registers for good, and has no way back of its own.
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]
