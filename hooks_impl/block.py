"""Block by block (arXiv 2504.15364), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, arguments, observed
from press_core.methods.block import Block


@dataclass
class BlockPress(Block, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        if self.leaves_whole(call):
            return keys, values
        competition = self.competition(call)
        for this in competition.rounds():
            competition.judge(self.press.score(*arguments(this, kwargs)))
        return call.keep(competition.kept)
