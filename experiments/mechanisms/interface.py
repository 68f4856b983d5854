"""The extension point of `transformers`: an attention function of one's own, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from experiments import UserError
from experiments.mechanisms.press import Score, as_press, evicting

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
    name = f"{former}_evicting_{next(_number)}"
    attend = ALL_ATTENTION_FUNCTIONS[former]
    AttentionInterface.register(name, evicting(attend, compression_ratio, score))
    AttentionMaskInterface.register(name, AttentionMaskInterface._global_mapping[former])
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(former)
        # The library registers for good, and has no way back of its own.
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]
