"""Kept keys at the positions of a shorter context."""

from __future__ import annotations

from dataclasses import dataclass

from press_core.scope import Press
from press_core.wrapping import Wrapper, takes_even


@dataclass
class KeyRerotation(Wrapper):
    """Prunes, then turns each kept key to its new position `0 ... n - 1`.

    Later positions continue from `n`, also where the model counts otherwise.

    Attributes:
        press: evicts as many tokens of each head.
    """

    uses_rope = True

    def takes(self, press: Press) -> tuple[bool, str]:
        return takes_even(press)
