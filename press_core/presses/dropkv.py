"""DropKV (openreview MqfNzH3TVH): what the last outputs lose when one pair goes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from press_core.attention import window_attention
from press_core.call import AttentionCall
from press_core.press import Needs, RatioScorer, require
from press_core.select import protect, trailing, upcast


@dataclass
class DropKV(RatioScorer):
    """Keeps the pairs without which the last outputs would change most (MqfNzH3TVH).

    If pair `j` goes and its weight is shared among the others, output `o_i` moves by
    `p_ij / (1 - p_ij) * (o_i - v_j)`; the score is the sum of the squares of that. Scores of
    different heads can be compared. Contexts of at most `window_size` tokens are left whole.

    Attributes:
        window_size: last tokens, whose outputs count and which are themselves always kept.
        kernel_size: width of the average pooling over neighbouring keys; odd.
        epsilon: added to `1 - p_ij`.
    """

    window_size: int = 32
    kernel_size: int = 7
    epsilon: float = 1e-6

    needs = Needs.QUERIES

    def validate(self) -> None:
        super().validate()
        require(self, "window_size", self.window_size >= 1, "a number of tokens, 1 or more")
        odd = self.kernel_size >= 1 and self.kernel_size % 2 == 1
        require(self, "kernel_size", odd, "odd and positive")
        require(self, "epsilon", self.epsilon > 0, "more than 0")

    def is_long_enough(self, length: int) -> bool:
        return length > self.window_size

    def score_tokens(self, call: AttentionCall) -> Tensor:
        loss = output_loss(call, self.window_size, self.epsilon)
        pooled = avg_pool1d(loss, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        window = trailing(call.keys, self.window_size)
        return protect(pad(pooled, (0, self.window_size)), window)


def output_loss(call: AttentionCall, window_size: int, epsilon: float) -> Tensor:
    """How far the last outputs move without each of the tokens before them.

    Returns:
        Sum over the window of the squared distances, mean over the group, `(B, H_kv, S - w)`.
    """
    weights = window_attention(call, window_size)  # (B, H_kv, G, w, S)
    values = upcast(call.values).unsqueeze(2)
    outputs = weights @ values  # (B, H_kv, G, w, d)
    weights = weights[..., : call.length - window_size]
    values = values[..., : call.length - window_size, :]
    odds = (weights / (1 - weights + epsilon)).square()
    # ‖v - o‖² = ‖v‖² - 2 v·o + ‖o‖², without a tensor of (w, S, d)
    distances = values.square().sum(dim=-1).unsqueeze(-2) - 2 * outputs @ values.mT
    distances = (distances + outputs.square().sum(dim=-1, keepdim=True)).clamp(min=0)
    return (odds * distances).sum(dim=3).mean(dim=2)
