"""Presses that prune repeatedly: after every step, at intervals while decoding, or at every turn.

H2O (Zhang et al., arXiv 2306.14048) prunes after every step.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass

from torch import Tensor

from press_core.attention import received_attention
from press_core.budget import Amount, Tokens, n_kept
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import amount_field, count, limited, require, share
from press_core.press import Press, RatioPress
from press_core.scoring import SCORER_AGAIN, Around, BudgetPress, Composition, SizedPress
from press_core.select import protect, top_positions, trailing
from press_core.traits import Evicts, Needs, Phase

RECEIVED = "received attention"


class Accumulating(Press):
    """A press that accumulates the attention that each key receives, over all forwards."""

    needs = Needs.QUERIES | Needs.MEMORY

    def remember(self, call: AttentionCall) -> Mapping[str, Tensor]:
        """The attention that each key has received so far, in the phases of the press."""
        received = received_attention(call)
        received = received + call.memory[RECEIVED] if RECEIVED in call.memory else received
        return {**super().remember(call), RECEIVED: received}


@dataclass
class H2O(Accumulating, RatioPress, BudgetPress):
    """Keeps heavy hitters and recent tokens, while decoding too (H2O, arXiv 2306.14048).

    The score of a token is its accumulated attention: the sum over all queries since the token was
    appended, averaged over the GQA group. After the prefill and after every later forward, each KV
    head keeps its most recent tokens and, of the others, those with the highest scores. With a
    ratio, a layer keeps the length that the prefill left; with a number of `Tokens`, it grows up to
    that. Attention is summed block by block with any attention implementation; the whole attention
    matrix is never in memory.

    Attributes:
        compression_ratio: share of the context's tokens that each KV head evicts, in [0, 1), or the
            `Tokens` that it keeps. 0 evicts nothing, not even while decoding.
        recent_ratio: share of the kept tokens that are the most recent ones, in [0, 1].
    """

    recent_ratio: float = share(0.5)

    phases = Phase.PREFILL | Phase.DECODING

    def budget(self, call: AttentionCall) -> int:
        if not call.when.decoding or isinstance(self.compression_ratio, Tokens):
            return super().budget(call)
        held = call.when.held or (call.length,)
        # Another scope may have evicted more already.
        return min(call.length, held[0]) if self.compression_ratio else call.length

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        recent = trailing(call.keys, n - int(n * (1 - self.recent_ratio)))
        return Eviction.keep(call, top_positions(protect(call.memory[RECEIVED], recent), n))


@dataclass
class AtIntervals(Composition):
    """A press that prunes the cache every `compression_interval` decoding steps.

    Attributes:
        base_press: scores tokens; its own ratio is not used.
        compression_interval: number of decoding forwards between two prunings.
    """

    base_press: Press = limited(MISSING, *SCORER_AGAIN)
    compression_interval: int = count(512, 1)

    evicts = Evicts.TOKENS
    phases = Phase.DECODING

    def validate(self) -> None:
        super().validate()
        fits = not self.base_press.all_needs & Needs.QUERIES or self.buffered_tokens >= 1
        allowed = "0 or more; 1 or more for a base_press that reads queries"
        require(self, "hidden_states_buffer_size", fits, allowed)

    def reset(self) -> None:
        """Do nothing: buffers belong to the cache of a run, not to the press."""

    def keeps(self, length: int) -> int:
        return length  # the prefill is not pruned

    def is_due(self, n_steps: int, n_new: int) -> bool:
        return n_steps >= self.compression_interval

    def is_awaited(self, n_steps: int, n_new: int, n_buffered: int) -> bool:
        # Each step appends at least one token: only the last `n_buffered` steps can be buffered.
        return n_steps + max(1, n_buffered) > self.compression_interval

    def compress(self, call: AttentionCall) -> Eviction:
        return self.base_press.evict(call.with_budget(self.budget(call)))


@dataclass
class Decoding(SizedPress, AtIntervals):
    """Keeps the `target_size` best tokens, pruning every `compression_interval` decoding steps.

    The cache grows while decoding and is pruned back at each interval. The prefill is not pruned.

    Attributes:
        base_press: scores tokens (a ScorerPress or CriticalKVPress); its own ratio is not used.
        compression_interval: number of decoding forwards between two prunings.
        target_size: tokens that each KV head keeps at each pruning.
        hidden_states_buffer_size: number of the last tokens since the previous pruning whose hidden
            states and queries are buffered for `base_press`; 1 or more if it reads queries.
    """

    target_size: int = count(2048, 1)
    hidden_states_buffer_size: int = count(256)


@dataclass
class CompressionRatioDecoding(AtIntervals):
    """Keeps a share of all tokens seen so far, pruning every `compression_interval` decoding steps.

    The target is `max(1, int(seen * (1 - target_compression_ratio)))`, where `seen` counts the
    context, decoded and evicted tokens of a row. The prefill is not pruned.

    Attributes:
        base_press: scores tokens (a ScorerPress or CriticalKVPress); its own ratio is not used.
        compression_interval: number of decoding forwards between two prunings.
        hidden_states_buffer_size: number of the last tokens since the previous pruning whose hidden
            states and queries are buffered for `base_press`; 1 or more if it reads queries.
        target_compression_ratio: share of the seen tokens that each KV head has evicted after a
            pruning, in [0, 1); or the `Tokens` that it keeps.
    """

    hidden_states_buffer_size: int = count(256)
    target_compression_ratio: Amount = amount_field(0.5)

    ratio_field = "target_compression_ratio"
    row_by_row = True  # rows of different lengths keep different numbers

    def budget(self, call: AttentionCall) -> int:
        seen = call.when.seen or (call.length,)  # outside of any scope, nobody counts more
        return min(call.length, n_kept(seen[0], self.target_compression_ratio))


@dataclass
class EveryTurn(SizedPress, Around, BudgetPress):
    """Keeps the `target_size` best tokens after every turn of a conversation.

    A turn is a forward of several tokens: the context, and each later question. After its
    attention, each KV head that holds more than `target_size` tokens keeps the best of all of them:
    context, questions and answers. Tokens decoded one by one are kept until the next turn.

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress), and can score them again in later
            forwards; its own ratio is not used.
        target_size: most tokens that each KV head keeps after a turn.
        hidden_states_buffer_size: number of the last tokens since the previous turn whose hidden
            states and queries are buffered for `press`, which sees those of the turn in any case.
    """

    press: Press = limited(MISSING, *SCORER_AGAIN)
    target_size: int = count(2048, 1)
    hidden_states_buffer_size: int = count(256)

    phases = Phase.PREFILL | Phase.DECODING

    def is_due(self, n_steps: int, n_new: int) -> bool:
        return n_new > 1

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        return self.press.evict(call.with_budget(n))


@dataclass
class PrefillDecoding(Composition):
    """Prunes the prefill with one press, and the cache while decoding with another.

    Attributes:
        prefilling_press: prunes after the prefill. With a `decoding_press`, it must keep the same
            number of tokens in each head, and all channels. None: the prefill is not pruned.
        decoding_press: prunes while decoding (a DecodingPress, CAMPress or
            CompressionRatioDecodingPress). None: decoded tokens are not pruned.
    """

    prefilling_press: Press | None = limited(
        None, lambda x: x is None or x.phases.in_prefill_only, "a press that acts after the prefill"
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
            allowed = "one that leaves heads of one length and all channels, to be pruned again"
            require(self, "prefilling_press", fits, allowed)

    remember = Press.remember  # of the part that acts

    def compress(self, call: AttentionCall) -> Eviction:
        press = self.decoding_press if call.when.decoding else self.prefilling_press
        return Eviction.nothing(call) if press is None else press.evict(call)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        if self.prefilling_press is None:
            return super().with_ratio(compression_ratio)
        return self.changed(prefilling_press=self.prefilling_press.with_ratio(compression_ratio))

    def with_budget(self, tokens: int) -> Press:
        parts = {name: part.with_budget(tokens) for name, part in self._named_parts()}
        return self.changed(**parts)

    @property
    def amount(self) -> Amount:
        return 0.0 if self.prefilling_press is None else self.prefilling_press.amount

    def is_awaited(self, n_steps: int, n_new: int, n_buffered: int) -> bool:
        press = self.decoding_press
        return press is not None and press.is_awaited(n_steps, n_new, n_buffered)
