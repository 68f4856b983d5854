"""Every press, installed by PyTorch's own forward hooks."""

from hooks_impl.base import BasePress, queries
from hooks_impl.expected_attention import ExpectedAttentionPress
from hooks_impl.keydiff import KeyDiffPress
from hooks_impl.knorm import KnormPress
from hooks_impl.lagkv import LagKVPress
from hooks_impl.observed_attention import ObservedAttentionPress
from hooks_impl.random import RandomPress
from hooks_impl.scorer import ScorerPress
from hooks_impl.snapkv import SnapKVPress
from hooks_impl.streaming_llm import StreamingLLMPress
from hooks_impl.tova import TOVAPress

PRESSES: dict[str, type[BasePress]] = {
    press.__name__: press
    for press in (
        ExpectedAttentionPress,
        KeyDiffPress,
        KnormPress,
        LagKVPress,
        ObservedAttentionPress,
        RandomPress,
        SnapKVPress,
        StreamingLLMPress,
        TOVAPress,
    )
}
"""Every press of this package by its name."""

__all__ = [
    "PRESSES",
    "BasePress",
    "ExpectedAttentionPress",
    "KeyDiffPress",
    "KnormPress",
    "LagKVPress",
    "ObservedAttentionPress",
    "RandomPress",
    "ScorerPress",
    "SnapKVPress",
    "StreamingLLMPress",
    "TOVAPress",
    "queries",
]
