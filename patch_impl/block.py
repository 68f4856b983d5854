"""Block by block (arXiv 2504.15364), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.block import Block


@dataclass
class BlockPress(Block, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        if self.leaves_whole(call):
            return call.keys, call.values
        competition = self.competition(call)
        for this in competition.rounds():
            competition.judge(self.press.score(this))
        return call.keep(competition.kept)
