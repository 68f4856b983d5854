"""Neither hook nor patch: a mode of torch that sees every function that this thread calls."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from experiments.mechanisms.press import Score, as_press, evict_in_place


class _Evicting(TorchFunctionMode):
    def __init__(self, compression_ratio: float, score: Score) -> None:
        super().__init__()
        self.compression_ratio, self.score = compression_ratio, score

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            evict_in_place(self.compression_ratio, self.score, *args[:3])
        return output


@as_press
def function_mode(
    model: PreTrainedModel, compression_ratio: float, score: Score
) -> TorchFunctionMode:
    """A mode that prunes after each scaled dot-product attention; `model` makes no difference."""
    return _Evicting(compression_ratio, score)
