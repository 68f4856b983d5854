"""One press for the prefill, another while decoding, with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.base import BasePress
from press_core.call import AttentionCall
from press_core.methods.prefill_decoding import PrefillDecoding


@dataclass
class PrefillDecodingPress(PrefillDecoding, BasePress):
    def compress(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return self.at(call).compress(call)
