"""Every press, installed by PyTorch's own forward hooks."""

from hooks_impl.adakv import AdaKVPress
from hooks_impl.base import BasePress, queries
from hooks_impl.block import BlockPress
from hooks_impl.chunk import ChunkPress
from hooks_impl.chunkkv import ChunkKVPress
from hooks_impl.compactor import CompactorPress
from hooks_impl.composed import ComposedPress
from hooks_impl.critical_adakv import CriticalAdaKVPress
from hooks_impl.criticalkv import CriticalKVPress
from hooks_impl.cur import CURPress
from hooks_impl.decoding import DecodingPress
from hooks_impl.dms import DMSPress
from hooks_impl.duo_attention import DuoAttentionPress
from hooks_impl.expected_attention import ExpectedAttentionPress
from hooks_impl.expected_attention_stats import ExpectedAttentionStatsPress
from hooks_impl.finch import FinchPress
from hooks_impl.key_rerotation import KeyRerotationPress
from hooks_impl.keydiff import KeyDiffPress
from hooks_impl.knorm import KnormPress
from hooks_impl.kvzap import KVzapPress
from hooks_impl.kvzip import KVzipPress
from hooks_impl.lagkv import LagKVPress
from hooks_impl.leverage_score import LeverageScorePress
from hooks_impl.non_causal_attn import NonCausalAttnPress
from hooks_impl.observed_attention import ObservedAttentionPress
from hooks_impl.per_layer_compression import PerLayerCompressionPress
from hooks_impl.prefill_decoding import PrefillDecodingPress
from hooks_impl.pyramidkv import PyramidKVPress
from hooks_impl.qfilter import QFilterPress
from hooks_impl.random import RandomPress
from hooks_impl.scorer import ScorerPress
from hooks_impl.simlayerkv import SimLayerKVPress
from hooks_impl.snapkv import SnapKVPress
from hooks_impl.streaming_llm import StreamingLLMPress
from hooks_impl.streaming_llm_decoding import StreamingLLMDecodingPress
from hooks_impl.think import ThinKPress
from hooks_impl.tova import TOVAPress

PRESSES: dict[str, type[BasePress]] = {
    press.__name__: press
    for press in (
        AdaKVPress,
        BlockPress,
        CURPress,
        ChunkKVPress,
        ChunkPress,
        CompactorPress,
        ComposedPress,
        CriticalAdaKVPress,
        CriticalKVPress,
        DMSPress,
        DecodingPress,
        DuoAttentionPress,
        ExpectedAttentionPress,
        ExpectedAttentionStatsPress,
        FinchPress,
        KVzapPress,
        KVzipPress,
        KeyDiffPress,
        KeyRerotationPress,
        KnormPress,
        LagKVPress,
        LeverageScorePress,
        NonCausalAttnPress,
        ObservedAttentionPress,
        PerLayerCompressionPress,
        PrefillDecodingPress,
        PyramidKVPress,
        QFilterPress,
        RandomPress,
        SimLayerKVPress,
        SnapKVPress,
        StreamingLLMDecodingPress,
        StreamingLLMPress,
        TOVAPress,
        ThinKPress,
    )
}
"""Every press of this package by its name."""

__all__ = [
    "PRESSES",
    "AdaKVPress",
    "BasePress",
    "BlockPress",
    "CURPress",
    "ChunkKVPress",
    "ChunkPress",
    "CompactorPress",
    "ComposedPress",
    "CriticalAdaKVPress",
    "CriticalKVPress",
    "DMSPress",
    "DecodingPress",
    "DuoAttentionPress",
    "ExpectedAttentionPress",
    "ExpectedAttentionStatsPress",
    "FinchPress",
    "KVzapPress",
    "KVzipPress",
    "KeyDiffPress",
    "KeyRerotationPress",
    "KnormPress",
    "LagKVPress",
    "LeverageScorePress",
    "NonCausalAttnPress",
    "ObservedAttentionPress",
    "PerLayerCompressionPress",
    "PrefillDecodingPress",
    "PyramidKVPress",
    "QFilterPress",
    "RandomPress",
    "ScorerPress",
    "SimLayerKVPress",
    "SnapKVPress",
    "StreamingLLMDecodingPress",
    "StreamingLLMPress",
    "TOVAPress",
    "ThinKPress",
    "queries",
]
