"""The presses, installed by patches: each is its formula and the mechanism, and nothing else."""

from __future__ import annotations

import press_core.presses as formulas
from patch_impl.mechanism import BasePress, ScorerPress
from press_core.learned.duo_attention import DuoAttention
from press_core.learned.fast_kvzip import FastKVzip
from press_core.learned.kvzap import KVzap
from press_core.learned.lukv import LUKV
from press_core.learned.query_statistics import ExpectedAttentionWithStats, QFilter
from press_core.learned.restorekv import RestoreKV
from press_core.replay.kvcompose import KVCompose
from press_core.replay.kvzip import KVgrad, KVzip

# ---- Logic of their own --------------------------------------------------------------------------


class DuoAttentionPress(DuoAttention, BasePress): ...


class FinchPress(formulas.Finch, BasePress): ...


class H2OPress(formulas.H2O, BasePress): ...


class KVComposePress(KVCompose, BasePress): ...


class KVgradPress(KVgrad, BasePress): ...


class KVzipPress(KVzip, BasePress): ...


class FastKVzipPress(FastKVzip, BasePress):
    teacher = KVzipPress


class RestoreKVPress(RestoreKV, BasePress): ...


class SimLayerKVPress(formulas.SimLayerKV, BasePress): ...


class StreamingLLMDecodingPress(formulas.StreamingLLMDecoding, BasePress): ...


class ThinKPress(formulas.ThinK, BasePress): ...


# ---- Scores: the best tokens of each KV head stay ------------------------------------------------


class CapPress(formulas.Cap, ScorerPress): ...


class CompactorPress(formulas.Compactor, ScorerPress): ...


class CURPress(formulas.CUR, ScorerPress): ...


class DropKVPress(formulas.DropKV, ScorerPress): ...


class ExpectedAttentionPress(formulas.ExpectedAttention, ScorerPress): ...


class KeyDiffPress(formulas.KeyDiff, ScorerPress): ...


class KnormPress(formulas.Knorm, ScorerPress): ...


class KVzapPress(KVzap, ScorerPress):
    teacher = KVzipPress


class LagKVPress(formulas.LagKV, ScorerPress): ...


class LeverageScorePress(formulas.LeverageScore, ScorerPress): ...


class NonCausalAttnPress(formulas.NonCausalAttn, ScorerPress): ...


class ObservedAttentionPress(formulas.ObservedAttention, ScorerPress): ...


class QFilterPress(QFilter, ScorerPress): ...


class RKVPress(formulas.RKV, ScorerPress): ...


class RandomPress(formulas.Random, ScorerPress): ...


class SnapKVPress(formulas.SnapKV, ScorerPress): ...


class StreamingLLMPress(formulas.StreamingLLM, ScorerPress): ...


class TOVAPress(formulas.TOVA, ScorerPress): ...


class ExpectedAttentionStatsPress(ExpectedAttentionWithStats, ExpectedAttentionPress): ...


class PyramidKVPress(formulas.PyramidKV, SnapKVPress): ...


# ---- Presses around other presses ----------------------------------------------------------------


class CriticalKVPress(formulas.CriticalKV, ScorerPress): ...  # type: ignore[misc]


class AdaKVPress(formulas.AdaKV, BasePress): ...


class BlockPress(formulas.Block, BasePress): ...


class ChunkPress(formulas.Chunk, BasePress): ...


class ChunkKVPress(formulas.ChunkKV, BasePress): ...


class ComposedPress(formulas.Composed, BasePress): ...


class CompressionRatioDecodingPress(formulas.CompressionRatioDecoding, BasePress): ...


class CriticalAdaKVPress(formulas.CriticalAdaKV, BasePress): ...


class DecodingPress(formulas.Decoding, BasePress): ...


class CAMPress(formulas.CAM, DecodingPress): ...


class DMSPress(formulas.DMS, BasePress): ...


class EntropyGatedChunkKVPress(formulas.EntropyGatedChunkKV, BasePress): ...


class EveryTurnPress(formulas.EveryTurn, BasePress): ...


class KeyRerotationPress(formulas.KeyRerotation, BasePress): ...


class LUKVPress(LUKV, BasePress):
    ranked_by = ExpectedAttentionPress


class MergingPress(formulas.Merging, BasePress): ...


class PerLayerCompressionPress(formulas.PerLayerCompression, BasePress): ...


class PrefillDecodingPress(formulas.PrefillDecoding, BasePress): ...


PRESSES: dict[str, type[BasePress]] = {
    name: press
    for name, press in sorted(globals().items())
    if isinstance(press, type) and issubclass(press, BasePress) and press.__module__ == __name__
}
"""Every press of this package by its name."""
