"""CurDKV (Sengupta et al., arXiv 2509.15038): rows of an approximate CUR decomposition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from press_core.call import AttentionCall
from press_core.press import RatioScorer, require
from press_core.presses.leverage_score import sketch
from press_core.select import leading, protect, upcast


@dataclass
class CUR(RatioScorer):
    """Keeps the rows that a CUR decomposition of keys and values would (arXiv 2509.15038).

    Contexts of at most `num_sinks` tokens are left whole.

    Attributes:
        num_sinks: first tokens, always kept.
        leverage_type: whose leverage counts: the keys', the values', the mean or the product.
        use_random_leverage: project the states to 20 random channels first (the same in every run).
        use_local_approximation: count each token as a share of its window.
        local_window_size: tokens per window, counted from the start; the last may be shorter.
    """

    num_sinks: int = 4
    leverage_type: Literal["key", "value", "kv_avg", "kv_product"] = "kv_product"
    use_random_leverage: bool = False
    use_local_approximation: bool = True
    local_window_size: int = 16

    def validate(self) -> None:
        super().validate()
        require(self, "num_sinks", self.num_sinks >= 0, "a number of tokens, 0 or more")
        allowed = ", ".join(_COMBINED)
        require(self, "leverage_type", self.leverage_type in _COMBINED, f"one of {allowed}")
        width = self.local_window_size
        require(self, "local_window_size", width >= 1, "a number of tokens, 1 or more")

    def is_long_enough(self, length: int) -> bool:
        return length > self.num_sinks

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return cur_scores(call.keys, call.values, self, call.site.layer_idx)


_COMBINED = {
    "key": lambda key, value: key,
    "value": lambda key, value: value,
    "kv_avg": lambda key, value: (key + value) / 2,
    "kv_product": lambda key, value: key * value,
}
_RANDOM_CHANNELS = 20


def cur_scores(keys: Tensor, values: Tensor, press: CUR, layer_idx: int) -> Tensor:
    """Squared norms of keys and values, each as a share of its window, combined.

    Args:
        keys, values: `(B, H_kv, S, d)`.

    Returns:
        `(B, H_kv, S)`, float32; each head's sum to one before its sinks are protected.
    """
    leverages = (_leverage(states, press, layer_idx) for states in (keys, values))
    scores = _shares(_COMBINED[press.leverage_type](*leverages))
    return protect(scores, leading(keys, press.num_sinks))


def _leverage(states: Tensor, press: CUR, layer_idx: int) -> Tensor:
    """`(B, H_kv, S, d)` to `(B, H_kv, S)`."""
    states = upcast(states)
    if press.use_random_leverage:
        states = states @ sketch((states.shape[-1], _RANDOM_CHANNELS), layer_idx, states)
    squares = states.norm(dim=-1).square()
    if not press.use_local_approximation:
        return squares
    length, width = squares.shape[-1], press.local_window_size
    windows = pad(squares, (0, -length % width)).unflatten(-1, (-1, width))
    return _shares(windows).flatten(-2)[..., :length]


def _shares(x: Tensor) -> Tensor:
    """`x` divided by its sum over the last dimension; zeros stay what they are."""
    return x / x.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
