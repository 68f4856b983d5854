"""Pruning while decoding, at intervals."""

from __future__ import annotations

from dataclasses import dataclass, replace

from press_core.call import AttentionCall
from press_core.composite import CompositePress, check_child, takes_scorer
from press_core.eviction import Eviction
from press_core.press import Evicts, Needs, Phase, Press, TokenScorer, require


@dataclass
class AtIntervals(CompositePress):
    """Prunes a cache that has grown while decoding, every so many steps.

    Attributes:
        base_press: scores tokens.
        compression_interval: forwards after the prefill from one pruning to the next.
    """

    base_press: Press
    compression_interval: int = 512

    evicts = Evicts.NOTHING
    phases = Phase.DECODING

    def validate(self) -> None:
        super().validate()
        check_child(self, "base_press", self.base_press)
        fits, allowed = takes_scorer(self.base_press)
        fits = fits and Needs.FORWARD not in self.base_press.needs
        require(self, "base_press", fits, f"{allowed} and can score them again later")
        require(self, "compression_interval", self.compression_interval >= 1, "1 or more")
        least = 1 if Needs.QUERIES in self.base_press.needs else 0
        fits = self._buffer_size >= least
        allowed = "0 or more; 1 or more for a base_press that reads queries"
        require(self, "hidden_states_buffer_size", fits, allowed)

    @property
    def _buffer_size(self) -> int:
        return int(vars(self)["hidden_states_buffer_size"])  # a field that subclasses have

    @property
    def buffered_tokens(self) -> int:  # type: ignore[override]
        return self._buffer_size if self.base_press.reads_forwards else 0

    def reset(self) -> None:
        """Does nothing: what a run has buffered belongs to its cache, not to the press."""

    def is_due(self, n_steps: int, n_new: int) -> bool:
        return n_steps >= self.compression_interval

    def target(self, call: AttentionCall) -> int:
        """How many tokens each KV head keeps."""
        raise NotImplementedError

    @property
    def scorer(self) -> TokenScorer:
        """`base_press`."""
        assert isinstance(self.base_press, TokenScorer)
        return self.base_press

    def decide(self, call: AttentionCall) -> Eviction:
        return self.base_press.evict(call.with_budget(self.target(call)))


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

    target_size: int = 2048
    hidden_states_buffer_size: int = 256

    def validate(self) -> None:
        super().validate()
        require(self, "target_size", self.target_size >= 1, "1 or more")

    def with_budget(self, tokens: int) -> Press:
        return replace(self, target_size=tokens)

    def target(self, call: AttentionCall) -> int:
        return self.target_size
