"""The presses, installed by patches: each is its formula and the mechanism, and nothing else."""

from functools import partial

from patch_impl.mechanism import BasePress, ScorerPress
from press_core import formulas

# ---- Logic of their own --------------------------------------------------------------------------


class DuoAttentionPress(formulas.DuoAttention, BasePress): ...


class FinchPress(formulas.Finch, BasePress): ...


class H2OPress(formulas.H2O, BasePress): ...


class KVComposePress(formulas.KVCompose, BasePress): ...


class KVgradPress(formulas.KVgrad, BasePress): ...


class KVzipPress(formulas.KVzip, BasePress): ...


class FastKVzipPress(formulas.FastKVzip, BasePress):
    teacher = KVzipPress


class RestoreKVPress(formulas.RestoreKV, BasePress): ...


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


class KVzapPress(formulas.KVzap, ScorerPress):
    teacher = partial(KVzipPress, kvzip_plus_normalization=True)


class LagKVPress(formulas.LagKV, ScorerPress): ...


class LeverageScorePress(formulas.LeverageScore, ScorerPress): ...


class NonCausalAttnPress(formulas.NonCausalAttn, ScorerPress): ...


class ObservedAttentionPress(formulas.ObservedAttention, ScorerPress): ...


class QFilterPress(formulas.QFilter, ScorerPress): ...


class RKVPress(formulas.RKV, ScorerPress): ...


class RandomPress(formulas.Random, ScorerPress): ...


class SnapKVPress(formulas.SnapKV, ScorerPress): ...


class StreamingLLMPress(formulas.StreamingLLM, ScorerPress): ...


class TOVAPress(formulas.TOVA, ScorerPress): ...


class ExpectedAttentionStatsPress(formulas.ExpectedAttentionWithStats, ExpectedAttentionPress): ...


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


class LUKVPress(formulas.LUKV, BasePress):
    ranked_by = ExpectedAttentionPress


class MergingPress(formulas.Merging, BasePress): ...


class PerLayerCompressionPress(formulas.PerLayerCompression, BasePress): ...


class PrefillDecodingPress(formulas.PrefillDecoding, BasePress): ...


PRESSES: dict[str, type[BasePress]] = {
    name: x for name, x in sorted(globals().items()) if getattr(x, "__module__", "") == __name__
}
"""Every press of this package by its name."""
