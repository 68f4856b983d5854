"""One press for the prefill, another while decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace

from press_core.call import AttentionCall
from press_core.composite import (
    CompositePress,
    acts_in_prefill_only,
    asked_ratio,
    check_child,
)
from press_core.eviction import Eviction
from press_core.press import Evicts, Press, require
from press_core.presses.decoding import AtIntervals
from press_core.select import Amount


@dataclass
class PrefillDecoding(CompositePress):
    """Leaves the prefill to one press and what is decoded to another.

    Attributes:
        prefilling_press: acts after the prefill; None: nothing does.
        decoding_press: acts while decoding, at intervals; None: nothing is pruned while decoding.
    """

    prefilling_press: Press | None = None
    decoding_press: Press | None = None

    def validate(self) -> None:
        super().validate()
        if self.prefilling_press is not None:
            check_child(self, "prefilling_press", self.prefilling_press)
            require(self, "prefilling_press", *self._takes(self.prefilling_press))
        if self.decoding_press is not None:
            check_child(self, "decoding_press", self.decoding_press)
            fits = isinstance(self.decoding_press, AtIntervals)
            allowed = "a DecodingPress, CAMPress or CompressionRatioDecodingPress"
            require(self, "decoding_press", fits, allowed)

    def _takes(self, press: Press) -> tuple[bool, str]:
        """Whether `press` can act before the decoding press, and what can."""
        fits = acts_in_prefill_only(press)
        allowed = "a press that acts after the prefill"
        if self.decoding_press is None:
            return fits, allowed
        again = "and leaves heads of one length, with all channels, which can be pruned again"
        return fits and not press.evicts.needs_attention, f"{allowed} {again}"

    def decide(self, call: AttentionCall) -> Eviction:
        press = self.decoding_press if call.decoding else self.prefilling_press
        assert press is not None
        return press.evict(call)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        if self.prefilling_press is None:
            return super().with_ratio(compression_ratio)
        return replace(self, prefilling_press=self.prefilling_press.with_ratio(compression_ratio))

    def with_budget(self, tokens: int) -> Press:
        prefilling, decoding = self.prefilling_press, self.decoding_press
        return replace(
            self,
            prefilling_press=prefilling and prefilling.with_budget(tokens),
            decoding_press=decoding and decoding.with_budget(tokens),
        )

    @property
    def asked_ratio(self) -> float:
        return 0.0 if self.prefilling_press is None else asked_ratio(self.prefilling_press)

    @property
    def evicts(self) -> Evicts:  # type: ignore[override]
        prefilling = self.prefilling_press
        return Evicts.NOTHING if prefilling is None else prefilling.evicts

    @property
    def buffered_tokens(self) -> int:  # type: ignore[override]
        return 0 if self.decoding_press is None else self.decoding_press.buffered_tokens

    def is_due(self, n_steps: int, n_new: int) -> bool:
        return self.decoding_press is not None and self.decoding_press.is_due(n_steps, n_new)
