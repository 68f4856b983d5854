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
        prefilling, decoding = self.prefilling_press, self.decoding_press
        if prefilling is not None:
            check_inner(self, "prefilling_press", prefilling)
            fits = prefilling.acts_in_prefill and not prefilling.acts_in_decoding
            kinds = ("tokens",) if decoding is not None else ("tokens", "heads", "channels")
            allowed = "a press that acts after the prefill"
            if decoding is not None:
                allowed += " and leaves heads of one length, which can be pruned again"
            freed = getattr(prefilling, "free_memory", False)
            zeroed = prefilling.evicts == "channels" and not freed
            require(
                self, "prefilling_press", fits and (prefilling.evicts in kinds or zeroed), allowed
            )
        if decoding is not None:
            check_inner(self, "decoding_press", decoding)
            require(self, "decoding_press", isinstance(decoding, Decoding), "a DecodingPress")

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
