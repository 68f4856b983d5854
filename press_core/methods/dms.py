"""DMS at inference (Lancucki et al., arXiv 2506.05345): eviction by a threshold, delayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.call import AttentionCall
from press_core.scope import latest_run, require
from press_core.select import trailing
from press_core.wrapping import Wrapper


@dataclass
class DMS(Wrapper):
    """Evicts from each head what scores below a threshold once it leaves the window (2506.05345).

    Attributes:
        press: scores tokens.
        threshold: tokens that score lower are evicted.
        sliding_window_size: last tokens, which are not evicted yet.
        decoding: whether to go on while decoding; each token is then judged by the score it had
            when it came.
    """

    threshold: float
    sliding_window_size: int = 128
    decoding: bool = False

    evicts = "heads"
    needs_attention = True

    def validate(self) -> None:
        super().validate()
        number = isinstance(self.threshold, (int, float)) and self.threshold == self.threshold
        require(self, "threshold", number, "a number: tokens that score lower are evicted")
        fits = self.press.scores_alone or not self.decoding
        allowed = "one that scores each token by itself (KVzapPress, KnormPress...) with decoding"
        require(self, "press", fits, allowed)
        fits = self.sliding_window_size >= 1
        require(self, "sliding_window_size", fits, "a number of tokens, 1 or more")

    @property
    def acts_in_decoding(self) -> bool:  # type: ignore[override]
        return self.decoding

    @property  # type: ignore[misc]
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted in the scope opened last."""
        return latest_run(self).compression_ratio

    def judge(self, call: AttentionCall, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Evict by the `scores` `(B, H_kv, S)` of the keys of `call`."""
        window = self.sliding_window_size
        if call.remembered is None:
            call.remembered = scores[..., -window:]
            return call.keep_heads((scores >= self.threshold) | trailing(call.keys, window))
        known = torch.cat((call.remembered, scores), dim=-1)
        leaving = max(0, known.shape[-1] - window)
        call.evicted = known[..., :leaving] < self.threshold
        call.remembered = known[..., leaving:]
        return call.keys, call.values
