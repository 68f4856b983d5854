"""DMS at inference (Lancucki et al., arXiv 2506.05345): eviction by a threshold, delayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from press_core.call import AttentionCall
from press_core.composite import Around
from press_core.eviction import Eviction
from press_core.fields import count, limited, require
from press_core.select import trailing
from press_core.traits import Evicts, Phase

SCORES = "recent scores"
THRESHOLD = "a number: tokens that score lower are evicted"


@dataclass
class DMS(Around):
    """Evicts from each head what scores below a threshold once it leaves the window (2506.05345).

    Attributes:
        press: scores tokens.
        threshold: tokens that score lower are evicted.
        sliding_window_size: last tokens, which are not evicted yet.
        decoding: whether to go on while decoding; each token is then judged by the score it had
            when it came.
    """

    threshold: float = limited(None, lambda x: x is not None and x == x, THRESHOLD)
    sliding_window_size: int = count(128, 1)
    decoding: bool = False

    evicts = Evicts.PER_HEAD

    def validate(self) -> None:
        super().validate()
        fits = self.scorer.independent or not self.decoding
        allowed = (
            "one that scores each token by itself (KVzapPress, KnormPress, QFilterPress, or a "
            "ScorerPress of your own) with decoding=True, where a token is judged when it comes"
        )
        require(self, "press", fits, allowed)

    @property
    def phases(self) -> Phase:
        return Phase.PREFILL | Phase.DECODING if self.decoding else Phase.PREFILL

    def keeps(self, length: int) -> int:
        return 1 if self.is_long_enough(length) else length  # or more: the threshold decides

    def compress(self, call: AttentionCall) -> Eviction:
        if not self.is_long_enough(call.length):
            return Eviction.nothing(call)
        scores, window = self.scorer.checked_scores(call), self.sliding_window_size
        if SCORES not in call.carried:
            kept = (scores >= self.threshold) | trailing(call.keys, window)
            return Eviction.keep_per_head(call, kept, {SCORES: scores[..., -window:]})
        known = torch.cat((call.carried[SCORES], scores), dim=-1)
        leaving = max(0, known.shape[-1] - window)
        late = known[..., :leaving] < self.threshold
        return Eviction.late(call, late, {SCORES: known[..., leaving:]})
