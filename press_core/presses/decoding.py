"""Pruning again and again: step by step, at intervals while decoding, or turn by turn.

H2O (Zhang et al., arXiv 2306.14048) goes on from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass

from torch import Tensor

from press_core.attention import received_attention
from press_core.budget import Amount, Tokens, n_kept
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import amount_field, count, limited, require, share
from press_core.press import Press, RatioPress
from press_core.scoring import SCORER_AGAIN, Around, BudgetPress, Composition, acts_in_prefill_only
from press_core.select import protect, top_positions, trailing
from press_core.traits import Evicts, Needs, Phase

RECEIVED = "received attention"


class Accumulating(Press):
    """A press that adds up, from forward to forward, the attention that each key receives."""

    needs = Needs.QUERIES | Needs.MEMORY

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """The attention that each key has received so far, in the phases in which it acts."""
        received = received_attention(call)
        return {RECEIVED: received + call.memory[RECEIVED] if call.memory else received}


@dataclass
class H2O(Accumulating, RatioPress, BudgetPress):
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

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        recent = trailing(call.keys, n - int(n * (1 - self.recent_ratio)))
        return Eviction.keep(call, top_positions(protect(call.memory[RECEIVED], recent), n))


@dataclass
class AtIntervals(Composition):
    """Prunes a cache that has grown while decoding, every so many steps.

    Attributes:
        base_press: scores tokens.
        compression_interval: forwards after the prefill from one pruning to the next.
    """

    base_press: Press = limited(MISSING, *SCORER_AGAIN)
    compression_interval: int = count(512, 1)

    evicts = Evicts.TOKENS
    phases = Phase.DECODING

    def validate(self) -> None:
        super().validate()
        fits = Needs.QUERIES not in self.base_press.needs or self.buffered_tokens >= 1
        allowed = "0 or more; 1 or more for a base_press that reads queries"
        require(self, "hidden_states_buffer_size", fits, allowed)

    def reset(self) -> None:
        """Does nothing: what a run has buffered belongs to its cache, not to the press."""

    def is_due(self, n_steps: int, n_new: int) -> bool:
        return n_steps >= self.compression_interval

    def is_awaited(self, n_steps: int, n_new: int, n_buffered: int) -> bool:
        # Each step brings a token at least, so no more of them can be asked for.
        return n_steps + max(1, n_buffered) > self.compression_interval

    def compress(self, call: AttentionCall) -> Eviction:
        return self.base_press.evict(call.with_budget(self.budget(call)))


@dataclass
class Decoding(AtIntervals):
    """Prunes a cache that has grown while decoding, every so many steps, to a fixed size.

    Attributes:
        base_press: scores tokens.
        compression_interval: forwards after the prefill from one pruning to the next.
        target_size: tokens that each KV head then keeps.
        hidden_states_buffer_size: of how many of the last tokens since then the hidden states and
            queries are kept for `base_press`, if it may ask for them.
    """

    target_size: int = count(2048, 1)
    hidden_states_buffer_size: int = count(256)

    def with_budget(self, tokens: int) -> Press:
        return self.changed(target_size=tokens)

    def budget(self, call: AttentionCall) -> int:
        return min(call.length, self.target_size)


@dataclass
class CompressionRatioDecoding(AtIntervals):
    """Prunes a cache while decoding, every so many steps, to a share of all tokens so far.

    Attributes:
        base_press: scores tokens.
        compression_interval: forwards after the prefill from one pruning to the next.
        hidden_states_buffer_size: of how many of the last tokens since then the hidden states and
            queries are kept for `base_press`, if it may ask for them.
        target_compression_ratio: share of the tokens that a row has seen, those of the context and
            evicted ones too, that is then gone, in [0, 1); or the `Tokens` that are left.
    """

    hidden_states_buffer_size: int = count(256)
    target_compression_ratio: Amount = amount_field(0.5)

    ratio_field = "target_compression_ratio"
    row_by_row = True  # rows of different lengths keep different numbers

    def budget(self, call: AttentionCall) -> int:
        assert call.when.seen is not None
        return min(call.length, n_kept(call.when.seen[0], self.target_compression_ratio))


@dataclass
class EveryTurn(Around, BudgetPress):
    """Bounds the cache of a conversation: every turn is pruned, together with what is left before.

    A turn is a forward of several tokens: the context, and later each question. Once its attention
    has run, each KV head that holds more than `target_size` tokens keeps the best of them, those
    of answers among them. What is decoded token by token is left until the next turn.

    Attributes:
        press: scores tokens, and can score them again later.
        target_size: tokens that each KV head keeps at most after a turn.
        hidden_states_buffer_size: of how many of the last tokens before a turn the hidden states
            and queries are kept for `press`, if it may ask for them.
    """

    press: Press = limited(MISSING, *SCORER_AGAIN)
    target_size: int = count(2048, 1)
    hidden_states_buffer_size: int = count(256)

    phases = Phase.PREFILL | Phase.DECODING

    def with_budget(self, tokens: int) -> Press:
        return self.changed(target_size=tokens)

    @property
    def amount(self) -> Amount:
        return Tokens(self.target_size)

    def is_due(self, n_steps: int, n_new: int) -> bool:
        return n_new > 1

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        return self.press.evict(call.with_budget(n))


@dataclass
class PrefillDecoding(Composition):
    """Leaves the prefill to one press and what is decoded to another.

    Attributes:
        prefilling_press: acts after the prefill; None: nothing does.
        decoding_press: acts while decoding, at intervals; None: nothing is pruned while decoding.
    """

    prefilling_press: Press | None = limited(
        None, lambda x: x is None or acts_in_prefill_only(x), "a press that acts after the prefill"
    )
    decoding_press: Press | None = limited(
        None,
        lambda x: x is None or isinstance(x, AtIntervals),
        "a DecodingPress, CAMPress or CompressionRatioDecodingPress",
    )

    def validate(self) -> None:
        super().validate()
        if self.prefilling_press is not None and self.decoding_press is not None:
            fits = not self.prefilling_press.evicts.needs_attention
            allowed = "one that leaves heads of one length, with all channels, to prune again"
            require(self, "prefilling_press", fits, allowed)

    def compress(self, call: AttentionCall) -> Eviction:
        press = self.decoding_press if call.when.decoding else self.prefilling_press
        return Eviction.nothing(call) if press is None else press.evict(call)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        if self.prefilling_press is None:
            return super().with_ratio(compression_ratio)
        return self.changed(prefilling_press=self.prefilling_press.with_ratio(compression_ratio))

    def with_budget(self, tokens: int) -> Press:
        prefilling, decoding = self.prefilling_press, self.decoding_press
        return self.changed(
            prefilling_press=prefilling and prefilling.with_budget(tokens),
            decoding_press=decoding and decoding.with_budget(tokens),
        )

    @property
    def amount(self) -> Amount:
        return 0.0 if self.prefilling_press is None else self.prefilling_press.amount

    def is_due(self, n_steps: int, n_new: int) -> bool:
        return self.decoding_press is not None and self.decoding_press.is_due(n_steps, n_new)

    def is_awaited(self, n_steps: int, n_new: int, n_buffered: int) -> bool:
        press = self.decoding_press
        return press is not None and press.is_awaited(n_steps, n_new, n_buffered)
