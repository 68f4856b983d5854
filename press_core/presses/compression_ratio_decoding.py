"""Pruning while decoding, at intervals, to a share of all tokens so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

from press_core.call import AttentionCall
from press_core.press import Press, require
from press_core.presses.decoding import AtIntervals
from press_core.select import Amount, Tokens, is_amount, n_kept


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

    hidden_states_buffer_size: int = 256
    target_compression_ratio: Amount = 0.5

    row_by_row = True  # rows of different lengths keep different numbers

    def validate(self) -> None:
        super().validate()
        fits = is_amount(self.target_compression_ratio)
        require(self, "target_compression_ratio", fits, "a number in [0, 1), or Tokens")

    def with_ratio(self, compression_ratio: Amount) -> Press:
        return replace(self, target_compression_ratio=compression_ratio)

    @property
    def asked_ratio(self) -> float:
        ratio = self.target_compression_ratio
        return 0.0 if isinstance(ratio, Tokens) else ratio

    def target(self, call: AttentionCall) -> int:
        assert call.seen is not None
        return n_kept(call.seen[0], self.target_compression_ratio)
