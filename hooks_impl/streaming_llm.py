"""StreamingLLM (arXiv 2309.17453), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import observed
from hooks_impl.scorer import ScorerPress
from press_core.methods.streaming_llm import StreamingLLM, streaming_llm_scores


@dataclass
class StreamingLLMPress(StreamingLLM, ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return streaming_llm_scores(keys, self.budget(observed(kwargs)), self.n_sink)
