"""One press for the prefill, another while decoding."""

from __future__ import annotations

from dataclasses import dataclass

from press_core.call import AttentionCall
from press_core.methods.decoding import Decoding
from press_core.scope import Press, latest_run, require
from press_core.wrapping import Nested, check_inner


@dataclass
class PrefillDecoding(Nested):
    """Leaves the prefill to one press and what is decoded to another.

    Attributes:
        prefilling_press: acts after the prefill; None: nothing does.
        decoding_press: a DecodingPress; None: nothing is pruned while decoding.
    """

    prefilling_press: Press | None = None
    decoding_press: Press | None = None

    def validate(self) -> None:
        super().validate()
        if self.prefilling_press is not None:
            check_inner(self, "prefilling_press", self.prefilling_press)
            require(self, "prefilling_press", *self._takes(self.prefilling_press))
        if self.decoding_press is not None:
            check_inner(self, "decoding_press", self.decoding_press)
            fits = isinstance(self.decoding_press, Decoding)
            require(self, "decoding_press", fits, "a DecodingPress")

    def _takes(self, press: Press) -> tuple[bool, str]:
        """Whether `press` can act before the decoding press, and what can."""
        fits = press.acts_in_prefill and not press.acts_in_decoding
        allowed = "a press that acts after the prefill"
        if self.decoding_press is None:
            return fits, allowed
        again = "and leaves heads of one length, with all channels, which can be pruned again"
        return fits and not press.needs_attention, f"{allowed} {again}"

    def at(self, call: AttentionCall) -> Press:
        """The press whose turn it is."""
        press = self.decoding_press if call.decoding else self.prefilling_press
        assert press is not None
        return press

    @property
    def compression_ratio(self) -> float:
        """Share of the tokens that was evicted in the scope opened last."""
        return latest_run(self).compression_ratio

    @property
    def evicts(self) -> str:  # type: ignore[override]
        return "nothing" if self.prefilling_press is None else self.prefilling_press.evicts

    @property
    def acts_in_prefill(self) -> bool:  # type: ignore[override]
        return self.prefilling_press is not None

    @property
    def acts_in_decoding(self) -> bool:  # type: ignore[override]
        return self.decoding_press is not None

    @property
    def n_remembered(self) -> int:  # type: ignore[override]
        return 0 if self.decoding_press is None else self.decoding_press.n_remembered

    def is_due(self, n_steps: int, length: int) -> bool:
        return self.decoding_press is not None and self.decoding_press.is_due(n_steps, length)
