"""One press for the prefill, another while decoding, with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress, arguments, observed
from press_core.methods.prefill_decoding import PrefillDecoding


@dataclass
class PrefillDecodingPress(PrefillDecoding, BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        call = observed(kwargs)
        return self.at(call).compress(*arguments(call, kwargs))
