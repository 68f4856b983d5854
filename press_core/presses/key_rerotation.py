"""Kept keys at the positions of a shorter context."""

from __future__ import annotations

from dataclasses import dataclass

from press_core.call import AttentionCall
from press_core.composite import Wrapper, takes_even
from press_core.eviction import Eviction
from press_core.press import Needs, Press


@dataclass
class KeyRerotation(Wrapper):
    """Prunes, then turns each kept key to its new position `0 ... n - 1`.

    Later positions continue from `n`, also where the model counts otherwise.

    Attributes:
        press: evicts as many tokens of each head.
    """

    own_needs = Needs.ROPE
    rerotates = True

    def decide(self, call: AttentionCall) -> Eviction:
        return self.press.evict(call).rerotated()

    def takes(self, press: Press) -> tuple[bool, str]:
        return takes_even(press)
