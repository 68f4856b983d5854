"""Presses one after the other, with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.composed import Composed


@dataclass
class ComposedPress(Composed, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        left = call
        for press in self.presses:
            left = left.following(*press.compress(left))
        return call.conclude(left)
