"""DuoAttention (arXiv 2410.10819), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, observed
from hooks_impl.collector import Collector
from press_core.methods.duo_attention import DuoAttention


@dataclass
class DuoAttentionPress(DuoAttention, BasePress):
    collector = Collector

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.keep(observed(kwargs))
