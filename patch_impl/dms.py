"""DMS at inference (arXiv 2506.05345), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.dms import DMS


@dataclass
class DMSPress(DMS, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        if not self.acts_on(call.length):
            return call.keys, call.values
        scores = self.press.score(call)
        return self.judge(call, scores)
