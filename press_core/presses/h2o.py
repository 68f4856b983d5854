"""H2O (Zhang et al., arXiv 2306.14048): heavy hitters and recent tokens, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from press_core.attention import received_attention
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.press import Needs, Phase, RatioPress, require
from press_core.select import Tokens, protect, top_positions, trailing

RECEIVED = "received attention"


@dataclass
class H2O(RatioPress):
    """Keeps the heavy hitters and the recent tokens, while decoding too (H2O, arXiv 2306.14048).

    A token's weight is all attention that it has received since it came, from every query of its
    group. After the prefill, and after each forward from then on, a layer loses as many of the
    lightest tokens as it has too many, and never a recent one. It stays as long as the prefill has
    left it; told a number of tokens (`with_budget`), it grows up to that. Weights are summed row by
    row of the attention matrix, which is never there as a whole, under any attention
    implementation.

    Attributes:
        compression_ratio: share of the tokens of the context that each KV head evicts, in [0, 1); 0
            evicts nothing later either. Or the `Tokens` that it keeps.
        recent_ratio: share of what is kept that is kept for being recent, in [0, 1].
    """

    recent_ratio: float = 0.5

    needs = Needs.QUERIES
    phases = Phase.PREFILL | Phase.DECODING
    remembers = True

    def validate(self) -> None:
        super().validate()
        require(self, "recent_ratio", 0 <= self.recent_ratio <= 1, "a number in [0, 1]")

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """The attention that each key has received so far."""
        received = received_attention(call)
        return {RECEIVED: received + call.memory[RECEIVED] if call.memory else received}

    def budget(self, call: AttentionCall) -> int:
        if not call.decoding or isinstance(self.compression_ratio, Tokens):
            return super().budget(call)
        n_new = call.hidden_states.shape[1]
        return call.length - n_new if self.compression_ratio else call.length

    def decide(self, call: AttentionCall) -> Eviction:
        if self.leaves_whole(call):
            return Eviction.nothing(call)
        n = self.budget(call)
        recent = trailing(call.keys, n - int(n * (1 - self.recent_ratio)))
        return Eviction.keep(call, top_positions(protect(call.memory[RECEIVED], recent), n))
