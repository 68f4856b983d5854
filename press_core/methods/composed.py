"""Several presses, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from press_core.scope import Press, require
from press_core.wrapping import Nested, check_inner


@dataclass
class Composed(Nested):
    """Runs presses one after the other, each on what the former has left.

    Hidden states, queries and positions follow what is kept, so that any order works. A press that
    evicts other tokens of each head can only be the last.

    Attributes:
        presses: of the same mechanism, in the order in which they act.
    """

    presses: Sequence[Press]

    def validate(self) -> None:
        super().validate()
        listed = isinstance(self.presses, (list, tuple)) and len(self.presses) > 0
        require(self, "presses", listed, "a list of at least one press")
        for index, press in enumerate(self.presses):
            check_inner(self, "presses", press)
            prefill = press.acts_in_prefill and not press.acts_in_decoding
            last = index == len(self.presses) - 1
            fits = press.evicts in ("tokens", "channels") or (press.evicts == "heads" and last)
            allowed = "presses that act after the prefill; one that evicts by head must be the last"
            require(self, "presses", prefill and fits, allowed)
            freed = getattr(press, "free_memory", False)
            allowed = "such that a press that frees channels is the last"
            require(self, "presses", last or not freed, allowed)

    @property
    def compression_ratio(self) -> float:
        """Share of the whole that all presses evict together."""
        return 1 - prod(1 - press.compression_ratio for press in self.presses)  # type: ignore[attr-defined]

    @property
    def evicts(self) -> str:  # type: ignore[override]
        return "heads" if self.presses[-1].evicts == "heads" else "tokens"
