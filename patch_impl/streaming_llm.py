"""StreamingLLM (arXiv 2309.17453), with patches."""

from dataclasses import dataclass

from torch import Tensor

from patch_impl.scorer import ScorerPress
from press_core.call import AttentionCall
from press_core.methods.streaming_llm import StreamingLLM, streaming_llm_scores


@dataclass
class StreamingLLMPress(StreamingLLM, ScorerPress):
    def score(self, call: AttentionCall) -> Tensor:
        return streaming_llm_scores(call.keys, self.budget(call), self.n_sink)
