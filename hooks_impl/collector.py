"""Watching what a model computes, with hooks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hooks_impl.base import BasePress, observed
from press_core.call import AttentionCall


@dataclass
class Collector(BasePress):
    """Shows the call of every attention module to a function, and evicts nothing.

    Attributes:
        see: what to show it to; rows of different padding are shown one after the other, without.
        uses_queries, uses_rope: as of any press, but chosen for each.
        decoding: whether to show forwards that find their layer filled, rather than prefills.
    """

    see: Callable[[AttentionCall], Any]
    uses_queries: bool = True
    uses_rope: bool = False
    decoding: bool = False

    evicts = "nothing"

    @property
    def acts_in_prefill(self) -> bool:  # type: ignore[override]
        return not self.decoding

    @property
    def acts_in_decoding(self) -> bool:  # type: ignore[override]
        return self.decoding

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        self.see(observed(kwargs))
        return keys, values
