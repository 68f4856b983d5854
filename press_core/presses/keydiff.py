"""KeyDiff (Park et al., arXiv 2504.15364): keys unlike the others, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.eviction import Eviction
from press_core.fields import count
from press_core.scoring import RatioScorer
from press_core.select import top_positions, upcast
from press_core.traits import Needs, Phase


@dataclass
class KeyDiff(RatioScorer):
    """Keeps the keys that point away from the mean direction (Park et al., arXiv 2504.15364)."""

    def score(self, call: AttentionCall) -> Tensor:
        """Negative cosine between each key and the mean of the unit keys."""
        keys = upcast(call.keys)
        inverse = keys.norm(dim=-1).clamp(min=torch.finfo(keys.dtype).tiny).reciprocal()
        anchor = normalize(inverse.unsqueeze(2) @ keys, dim=-1)  # (B, H_kv, 1, d)
        return -(keys @ anchor.mT).squeeze(-1) * inverse


@dataclass
class Block(Wrapper):
    """Prunes block by block: what is kept so far and the next block compete for the budget.

    The block-wise eviction of KeyDiff (Park et al., arXiv 2504.15364), for any score. Where that
    takes keys and values alone, a prefill that comes in chunks is pruned after each: the cache
    holds no more than the budget and a chunk.

    Attributes:
        press: scores tokens.
        block_size: tokens that join the competition at a time.
    """

    block_size: int = count(128, 1)

    @property
    def phases(self) -> Phase:
        reads = Needs.QUERIES | Needs.ROPE | Needs.FORWARD | Needs.HIDDEN_STATES
        return Phase.PREFILL if self.press.needs & reads else Phase.IN_PREFILL

    def compress(self, call: AttentionCall) -> Eviction:
        n = self.budget(call)
        if n >= call.length:
            return Eviction.nothing(call)
        tokens = torch.arange(call.length, device=call.keys.device).expand(call.keys.shape[:3])
        kept = tokens[..., :n]
        for block in tokens[..., n:].split(self.block_size, dim=-1):
            kept = self.compete(call, torch.cat((kept, block), dim=-1), n)
        return Eviction.keep(call, kept)

    def compete(self, call: AttentionCall, candidates: Tensor, n: int) -> Tensor:
        """The best `n` of `candidates` `(B, H_kv, m)`; the last, where there are too few to judge.

        Returns:
            `(B, H_kv, n)` int64, ascending.
        """
        if not self.is_long_enough(candidates.shape[-1]):
            return candidates[..., -n:]
        scores = self.scorer.checked_scores(call.select(candidates).with_budget(n))
        return candidates.gather(-1, top_positions(scores, n))
