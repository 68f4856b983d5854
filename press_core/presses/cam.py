"""CaM (Zhang et al., ICML 2024, openreview LCTmppB165): merged before they are evicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from press_core.attention import received_attention
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.press import Needs, require
from press_core.presses.decoding import Decoding
from press_core.presses.random import check_seed, layer_generator
from press_core.select import best_first, gather_tokens, places, upcast

RECEIVED = "attention received while decoding"


@dataclass
class CAM(Decoding):
    """Prunes while decoding, and merges values that go into those that stay (CaM, LCTmppB165).

    Of the evicted tokens as many are merged as there were steps since the last pruning, those with
    the best scores. Each goes, in equal parts, to the next `merge_budget` kept tokens with the
    probability `clamp(a / mean a of these, 0, 1)`, `a` the attention that a token has received
    while decoding. All heads keep the same tokens, by the mean of their scores.

    Attributes:
        base_press: scores tokens.
        compression_interval: forwards after the prefill from one pruning to the next.
        target_size: tokens that each KV head then keeps.
        hidden_states_buffer_size: of how many of the last tokens since then the hidden states and
            queries are kept for `base_press`, if it may ask for them.
        merge_budget: kept tokens that an evicted one is shared among.
        seed: numbers come from `(seed, layer_idx, forward)` and are equal on every device, for
            every row of a batch and with both mechanisms. None: from torch's global generator.
    """

    merge_budget: int = 32
    seed: int | None = None

    own_needs = Needs.QUERIES
    remembers = True

    def validate(self) -> None:
        super().validate()
        require(self, "merge_budget", self.merge_budget >= 1, "a number of tokens, 1 or more")
        check_seed(self)

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """The attention that each key has received while decoding."""
        received = received_attention(call)
        return {RECEIVED: received + call.memory[RECEIVED] if call.memory else received}

    def decide(self, call: AttentionCall) -> Eviction:
        n = self.target(call)
        if n >= call.length or not self.base_press.is_long_enough(call.length):
            return Eviction.nothing(call)
        scores = self.scorer.token_scores(call.with_budget(n)).mean(dim=1, keepdim=True)
        chosen = best_first(scores, n).expand(call.keys.shape[:3])
        n_merged = min(call.n_steps, call.length - n)
        merged = best_first(scores.masked_fill(chosen[:, :1], float("-inf")), n_merged)
        eviction = Eviction.keep(call, places(chosen))
        values = self.merged(eviction, places(merged.expand_as(chosen)))
        return replace(eviction, values=values)

    def merged(self, kept: Eviction, evicted: Tensor) -> Tensor:
        """The kept values with evicted ones merged into them, `(B, H_kv, n, d)`.

        Args:
            evicted: `(B, H_kv, m)` int64, which to merge.
        """
        call, received = kept.call, kept.call.memory[RECEIVED]
        shares = shares_of_next(kept.known_kept, evicted, self.merge_budget).to(received.dtype)
        of_next = (shares @ received.gather(-1, kept.known_kept).unsqueeze(-1)).squeeze(-1)
        of_evicted = received.gather(-1, evicted)
        probabilities = of_evicted / of_next.clamp(min=torch.finfo(received.dtype).tiny)
        numbers = uniform(evicted.shape[1:], self.seed, call.site.layer_idx, call.n_forwards)
        drawn = numbers.to(received) < probabilities
        added = gather_tokens(upcast(call.values), evicted) * drawn.unsqueeze(-1)
        return (upcast(kept.values) + shares.mT @ added).to(kept.values.dtype)


def uniform(shape: torch.Size, seed: int | None, layer_idx: int, forward: int) -> Tensor:
    """Numbers in [0, 1) of some shape, float32, on the CPU; see `CAM.seed`."""
    generator = None
    if seed is not None:
        generator = layer_generator(seed, layer_idx)
        first = int(torch.randint(2**62, (), generator=generator))
        generator.manual_seed(first + forward)
    return torch.rand(shape, generator=generator)


def shares_of_next(kept: Tensor, evicted: Tensor, n_next: int) -> Tensor:
    """Equal parts of each of `evicted` for the next `n_next` of `kept` (fewer at the end).

    Args:
        kept: `(B, H_kv, n)` int64, ascending.
        evicted: `(B, H_kv, m)` int64.

    Returns:
        `(B, H_kv, m, n)`, rows that sum to 1, or to 0 where nothing that is kept comes after.
    """
    before = (kept.unsqueeze(2) < evicted.unsqueeze(3)).sum(dim=-1, keepdim=True)
    index = torch.arange(kept.shape[-1], device=kept.device)
    receives = (index >= before) & (index < before + n_next)
    return receives / receives.sum(dim=-1, keepdim=True).clamp(min=1)
