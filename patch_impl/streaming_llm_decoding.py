"""StreamingLLM for endless generation (arXiv 2309.17453), with patches."""

from dataclasses import dataclass

from patch_impl.base import BasePress
from press_core.methods.streaming_llm_decoding import StreamingLLMDecoding


@dataclass
class StreamingLLMDecodingPress(StreamingLLMDecoding, BasePress):
    # What it does before each forward stands in StreamingLLMDecoding: the mechanism only calls it.
    pass
