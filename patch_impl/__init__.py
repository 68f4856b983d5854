"""Every press, installed by reversible patches of the attention forwards."""

from patch_impl.base import BasePress
from patch_impl.expected_attention import ExpectedAttentionPress
from patch_impl.keydiff import KeyDiffPress
from patch_impl.knorm import KnormPress
from patch_impl.lagkv import LagKVPress
from patch_impl.observed_attention import ObservedAttentionPress
from patch_impl.random import RandomPress
from patch_impl.scorer import ScorerPress
from patch_impl.snapkv import SnapKVPress
from patch_impl.streaming_llm import StreamingLLMPress
from patch_impl.tova import TOVAPress
from press_core.call import AttentionCall

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
    "AttentionCall",
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
]
