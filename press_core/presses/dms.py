"""DMS at inference (Lancucki et al., arXiv 2506.05345): eviction by a threshold, delayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.eviction import Eviction
from press_core.press import Evicts, Phase, Press, require
from press_core.select import Amount, trailing


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

    evicts = Evicts.PER_HEAD

    def validate(self) -> None:
        super().validate()
        number = self.threshold == self.threshold
        require(self, "threshold", number, "a number: tokens that score lower are evicted")
        fits = self.scorer.independent or not self.decoding
        allowed = (
            "one that scores each token by itself (KVzapPress, KnormPress, QFilterPress, or a "
            "ScorerPress of your own) with decoding=True, where a token is judged when it comes"
        )
        require(self, "press", fits, allowed)
        fits = self.sliding_window_size >= 1
        require(self, "sliding_window_size", fits, "a number of tokens, 1 or more")

    @property
    def phases(self) -> Phase:  # type: ignore[override]
        return Phase.PREFILL | Phase.DECODING if self.decoding else Phase.PREFILL

    @property
    def asked_ratio(self) -> float:
        return 0.0  # the threshold decides

    def with_ratio(self, compression_ratio: Amount) -> Press:
        return Press.with_ratio(self, compression_ratio)  # refused: the threshold decides

    def decide(self, call: AttentionCall) -> Eviction:
        if not self.is_long_enough(call.length):
            return Eviction.nothing(call)
        scores, window = self.scorer.token_scores(call), self.sliding_window_size
        if call.recent_scores is None:
            kept = (scores >= self.threshold) | trailing(call.keys, window)
            return Eviction.keep_per_head(call, kept, recent_scores=scores[..., -window:])
        known = torch.cat((call.recent_scores, scores), dim=-1)
        leaving = max(0, known.shape[-1] - window)
        return Eviction.late(call, known[..., :leaving] < self.threshold, known[..., leaving:])
