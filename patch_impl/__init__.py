"""Every press, installed by reversible patches of the attention forwards."""

from patch_impl.adakv import AdaKVPress
from patch_impl.base import BasePress
from patch_impl.block import BlockPress
from patch_impl.chunk import ChunkPress
from patch_impl.chunkkv import ChunkKVPress
from patch_impl.compactor import CompactorPress
from patch_impl.composed import ComposedPress
from patch_impl.critical_adakv import CriticalAdaKVPress
from patch_impl.criticalkv import CriticalKVPress
from patch_impl.cur import CURPress
from patch_impl.decoding import DecodingPress
from patch_impl.dms import DMSPress
from patch_impl.duo_attention import DuoAttentionPress
from patch_impl.expected_attention import ExpectedAttentionPress
from patch_impl.expected_attention_stats import ExpectedAttentionStatsPress
from patch_impl.finch import FinchPress
from patch_impl.key_rerotation import KeyRerotationPress
from patch_impl.keydiff import KeyDiffPress
from patch_impl.knorm import KnormPress
from patch_impl.kvzap import KVzapPress
from patch_impl.kvzip import KVzipPress
from patch_impl.lagkv import LagKVPress
from patch_impl.leverage_score import LeverageScorePress
from patch_impl.non_causal_attn import NonCausalAttnPress
from patch_impl.observed_attention import ObservedAttentionPress
from patch_impl.per_layer_compression import PerLayerCompressionPress
from patch_impl.prefill_decoding import PrefillDecodingPress
from patch_impl.pyramidkv import PyramidKVPress
from patch_impl.qfilter import QFilterPress
from patch_impl.random import RandomPress
from patch_impl.scorer import ScorerPress
from patch_impl.simlayerkv import SimLayerKVPress
from patch_impl.snapkv import SnapKVPress
from patch_impl.streaming_llm import StreamingLLMPress
from patch_impl.streaming_llm_decoding import StreamingLLMDecodingPress
from patch_impl.think import ThinKPress
from patch_impl.tova import TOVAPress
from press_core.call import AttentionCall

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
    "AttentionCall",
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
]
