"""StreamingLLM for endless generation (arXiv 2309.17453), with hooks."""

from dataclasses import dataclass

from hooks_impl.base import BasePress
from press_core.methods.streaming_llm_decoding import StreamingLLMDecoding


@dataclass
class StreamingLLMDecodingPress(StreamingLLMDecoding, BasePress):
    # What it does before each forward stands in StreamingLLMDecoding: the mechanism only calls it.
    pass
