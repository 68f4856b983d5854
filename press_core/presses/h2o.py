"""H2O (Zhang et al., arXiv 2306.14048): heavy hitters, after the prefill or step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from press_core.attention import received_attention
from press_core.budget import Tokens
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import share
from press_core.press import Press, RatioPress
from press_core.scoring import RatioScorer
from press_core.select import protect, top_positions, trailing
from press_core.traits import Needs, Phase

RECEIVED = "received attention"


@dataclass
class ObservedAttention(RatioScorer):
    """Keeps the tokens that were attended to most during prefill (H2O, arXiv 2306.14048).

    Where the attention implementation returns weights (eager), those are used; elsewhere they are
    computed from the exact queries and keys, some rows at a time, in O(S) extra memory.
    """

    needs = Needs.QUERIES

    def score(self, call: AttentionCall) -> Tensor:
        """Mean attention that each key received from the queries that can see it."""
        n_queries = call.length if call.at.tokens is not None else call.hidden_states.shape[1]
        observers = torch.arange(call.length, 0, -1, device=call.keys.device)
        return received_attention(call) / observers.clamp(max=max(1, n_queries))


class Accumulating(Press):
    """A press that adds up, from forward to forward, the attention that each key receives."""

    needs = Needs.QUERIES | Needs.MEMORY

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """The attention that each key has received so far, in the phases in which it acts."""
        received = received_attention(call)
        return {RECEIVED: received + call.memory[RECEIVED] if call.memory else received}


@dataclass
class H2O(Accumulating, RatioPress):
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

    recent_ratio: float = share(0.5)

    phases = Phase.PREFILL | Phase.DECODING

    def budget(self, call: AttentionCall) -> int:
        if not call.when.decoding or isinstance(self.compression_ratio, Tokens):
            return super().budget(call)
        n_new = call.hidden_states.shape[1]
        return call.length - n_new if self.compression_ratio else call.length

    def compress(self, call: AttentionCall) -> Eviction:
        n = self.budget(call)
        if n >= call.length:
            return Eviction.nothing(call)
        recent = trailing(call.keys, n - int(n * (1 - self.recent_ratio)))
        return Eviction.keep(call, top_positions(protect(call.memory[RECEIVED], recent), n))
