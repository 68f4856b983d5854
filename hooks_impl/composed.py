"""Presses one after the other, with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, arguments, observed
from press_core.methods.composed import Composed


@dataclass
class ComposedPress(Composed, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        left = call
        for press in self.presses:
            left = left.following(*press.compress(*arguments(left, kwargs)))
        return call.conclude(left)
