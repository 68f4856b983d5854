"""The presses, installed by hooks: each is its formula and the mechanism, and nothing else."""

from __future__ import annotations

from hooks_impl.mechanism import BasePress, ScorerPress
from press_core.presses.adakv import AdaKV
from press_core.presses.block import Block
from press_core.presses.cam import CAM
from press_core.presses.cap import Cap
from press_core.presses.chunk import Chunk
from press_core.presses.chunkkv import ChunkKV
from press_core.presses.compactor import Compactor
from press_core.presses.composed import Composed
from press_core.presses.compression_ratio_decoding import CompressionRatioDecoding
from press_core.presses.critical_adakv import CriticalAdaKV
from press_core.presses.criticalkv import CriticalKV
from press_core.presses.cur import CUR
from press_core.presses.decoding import Decoding
from press_core.presses.dms import DMS
from press_core.presses.dropkv import DropKV
from press_core.presses.duo_attention import DuoAttention
from press_core.presses.entropy_gated_chunkkv import EntropyGatedChunkKV
from press_core.presses.every_turn import EveryTurn
from press_core.presses.expected_attention import ExpectedAttention
from press_core.presses.expected_attention_stats import ExpectedAttentionWithStats
from press_core.presses.fast_kvzip import FastKVzip
from press_core.presses.finch import Finch
from press_core.presses.h2o import H2O
from press_core.presses.key_rerotation import KeyRerotation
from press_core.presses.keydiff import KeyDiff
from press_core.presses.knorm import Knorm
from press_core.presses.kvcompose import KVCompose
from press_core.presses.kvgrad import KVgrad
from press_core.presses.kvzap import KVzap
from press_core.presses.kvzip import KVzip
from press_core.presses.lagkv import LagKV
from press_core.presses.leverage_score import LeverageScore
from press_core.presses.lukv import LUKV
from press_core.presses.merging import Merging
from press_core.presses.non_causal_attn import NonCausalAttn
from press_core.presses.observed_attention import ObservedAttention
from press_core.presses.per_layer_compression import PerLayerCompression
from press_core.presses.prefill_decoding import PrefillDecoding
from press_core.presses.pyramidkv import PyramidKV
from press_core.presses.qfilter import QFilter
from press_core.presses.random import Random
from press_core.presses.restorekv import RestoreKV
from press_core.presses.rkv import RKV
from press_core.presses.simlayerkv import SimLayerKV
from press_core.presses.snapkv import SnapKV
from press_core.presses.streaming_llm import StreamingLLM
from press_core.presses.streaming_llm_decoding import StreamingLLMDecoding
from press_core.presses.think import ThinK
from press_core.presses.tova import TOVA

# ---- Logic of their own --------------------------------------------------------------------------


class DuoAttentionPress(DuoAttention, BasePress): ...


class FinchPress(Finch, BasePress): ...


class H2OPress(H2O, BasePress): ...


class KVComposePress(KVCompose, BasePress): ...


class KVgradPress(KVgrad, BasePress): ...


class KVzipPress(KVzip, BasePress): ...


class FastKVzipPress(FastKVzip, BasePress):
    teacher = KVzipPress


class RestoreKVPress(RestoreKV, BasePress): ...


class SimLayerKVPress(SimLayerKV, BasePress): ...


class StreamingLLMDecodingPress(StreamingLLMDecoding, BasePress): ...


class ThinKPress(ThinK, BasePress): ...


# ---- Scores: the best tokens of each KV head stay ------------------------------------------------


class CapPress(Cap, ScorerPress): ...


class CompactorPress(Compactor, ScorerPress): ...


class CURPress(CUR, ScorerPress): ...


class DropKVPress(DropKV, ScorerPress): ...


class ExpectedAttentionPress(ExpectedAttention, ScorerPress): ...


class KeyDiffPress(KeyDiff, ScorerPress): ...


class KnormPress(Knorm, ScorerPress): ...


class KVzapPress(KVzap, ScorerPress):
    teacher = KVzipPress


class LagKVPress(LagKV, ScorerPress): ...


class LeverageScorePress(LeverageScore, ScorerPress): ...


class NonCausalAttnPress(NonCausalAttn, ScorerPress): ...


class ObservedAttentionPress(ObservedAttention, ScorerPress): ...


class QFilterPress(QFilter, ScorerPress): ...


class RKVPress(RKV, ScorerPress): ...


class RandomPress(Random, ScorerPress): ...


class SnapKVPress(SnapKV, ScorerPress): ...


class StreamingLLMPress(StreamingLLM, ScorerPress): ...


class TOVAPress(TOVA, ScorerPress): ...


class ExpectedAttentionStatsPress(ExpectedAttentionWithStats, ExpectedAttentionPress): ...


class PyramidKVPress(PyramidKV, SnapKVPress): ...


# ---- Presses around other presses ----------------------------------------------------------------


class CriticalKVPress(CriticalKV, ScorerPress): ...  # type: ignore[misc]


class AdaKVPress(AdaKV, BasePress): ...


class BlockPress(Block, BasePress): ...


class ChunkPress(Chunk, BasePress): ...


class ChunkKVPress(ChunkKV, BasePress): ...


class ComposedPress(Composed, BasePress): ...


class CompressionRatioDecodingPress(CompressionRatioDecoding, BasePress): ...


class CriticalAdaKVPress(CriticalAdaKV, BasePress): ...


class DecodingPress(Decoding, BasePress): ...


class CAMPress(CAM, DecodingPress): ...


class DMSPress(DMS, BasePress): ...


class EntropyGatedChunkKVPress(EntropyGatedChunkKV, BasePress): ...


class EveryTurnPress(EveryTurn, BasePress): ...


class KeyRerotationPress(KeyRerotation, BasePress): ...


class LUKVPress(LUKV, BasePress):
    ranked_by = ExpectedAttentionPress


class MergingPress(Merging, BasePress): ...


class PerLayerCompressionPress(PerLayerCompression, BasePress): ...


class PrefillDecodingPress(PrefillDecoding, BasePress): ...


PRESSES: dict[str, type[BasePress]] = {
    name: press
    for name, press in sorted(globals().items())
    if isinstance(press, type) and issubclass(press, BasePress) and press.__module__ == __name__
}
"""Every press of this package by its name."""
