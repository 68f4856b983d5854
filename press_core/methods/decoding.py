"""Pruning while decoding, at intervals."""

from __future__ import annotations

from dataclasses import dataclass

from press_core.call import AttentionCall
from press_core.scope import Press, latest_run, require
from press_core.wrapping import Nested, check_inner, takes_scorer


@dataclass
class Decoding(Nested):
    """Prunes a cache that has grown while decoding, every so many steps, to a fixed size.

    Attributes:
        base_press: scores tokens.
        compression_interval: forwards after the prefill from one pruning to the next.
        target_size: tokens that each KV head then keeps.
        hidden_states_buffer_size: of how many of the last tokens since then the hidden states and
            queries are kept for `base_press`.
    """

    base_press: Press
    compression_interval: int = 512
    target_size: int = 2048
    hidden_states_buffer_size: int = 256

    evicts = "nothing"
    acts_in_prefill = False
    acts_in_decoding = True

    def validate(self) -> None:
        super().validate()
        check_inner(self, "base_press", self.base_press)
        fits, allowed = takes_scorer(self.base_press)
        fits = fits and not self.base_press.scores_once
        require(self, "base_press", fits, f"{allowed} and can score them again later")
        for field in ("compression_interval", "target_size"):
            require(self, field, getattr(self, field) >= 1, "1 or more")
        fits = self.hidden_states_buffer_size >= (1 if self.base_press.uses_queries else 0)
        allowed = "0 or more; 1 or more for a base_press that reads queries"
        require(self, "hidden_states_buffer_size", fits, allowed)

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted in the scope opened last."""
        return latest_run(self).compression_ratio

    @property
    def n_remembered(self) -> int:  # type: ignore[override]
        return self.hidden_states_buffer_size

    def is_due(self, n_steps: int, length: int) -> bool:
        return n_steps >= self.compression_interval

    def budget(self, call: AttentionCall) -> int:
        return self.target_size
