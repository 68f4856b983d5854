"""SnapKV (Li et al., arXiv 2404.14469): what the last queries look at."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from press_core.attention import mean_attention
from press_core.call import AttentionCall
from press_core.press import Needs, RatioScorer, require
from press_core.select import protect, trailing


@dataclass
class SnapKV(RatioScorer):
    """Keeps what the last queries of the context attend to (Li et al., arXiv 2404.14469).

    Contexts of at most `window_size` tokens are left whole.

    Attributes:
        window_size: last tokens, whose queries vote and which are themselves always kept.
        kernel_size: width of the average pooling over neighbouring keys; odd.
    """

    window_size: int = 64
    kernel_size: int = 5

    needs = Needs.QUERIES

    def validate(self) -> None:
        super().validate()
        require(self, "window_size", self.window_size >= 1, "a number of tokens, 1 or more")
        odd = self.kernel_size >= 1 and self.kernel_size % 2 == 1
        require(self, "kernel_size", odd, "odd and positive")

    def is_long_enough(self, length: int) -> bool:
        return length > self.window_size

    def score_tokens(self, call: AttentionCall) -> Tensor:
        return snapkv_scores(call, self.window_size, self.kernel_size)


def snapkv_scores(call: AttentionCall, window_size: int, kernel_size: int) -> Tensor:
    """Mean attention of the window's queries on each key before it, pooled over neighbours.

    Returns:
        `(B, H_kv, S)`, float32; the window itself is protected.
    """
    before = call.length - window_size
    votes = mean_attention(call, call.queries(window_size))[..., :before]
    pooled = avg_pool1d(votes, kernel_size, stride=1, padding=kernel_size // 2)
    return protect(pad(pooled, (0, window_size)), trailing(call.keys, window_size))
