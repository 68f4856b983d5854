"""All formulas: what the two lists of presses are made of."""

from press_core.learned.fast_kvzip import FastKVzip
from press_core.learned.kvzap import KVzap
from press_core.learned.lukv import LUKV
from press_core.learned.measured import DuoAttention, ExpectedAttentionWithStats, QFilter
from press_core.learned.restorekv import RestoreKV
from press_core.presses.chunks import Block, Chunk, ChunkKV, EntropyGatedChunkKV
from press_core.presses.composed import Composed, KeyRerotation, PerLayerCompression
from press_core.presses.decoding import (
    H2O,
    CompressionRatioDecoding,
    Decoding,
    EveryTurn,
    ObservedAttention,
    PrefillDecoding,
)
from press_core.presses.expected_attention import Cap, ExpectedAttention
from press_core.presses.finch import Finch
from press_core.presses.headwise import DMS, AdaKV, CriticalAdaKV, CriticalKV
from press_core.presses.keys import (
    CUR,
    Compactor,
    KeyDiff,
    Knorm,
    LagKV,
    LeverageScore,
    NonCausalAttn,
)
from press_core.presses.merging import CAM, Merging
from press_core.presses.positions import Random, SimLayerKV, StreamingLLM, StreamingLLMDecoding
from press_core.presses.window import RKV, TOVA, DropKV, PyramidKV, SnapKV, ThinK
from press_core.replay.kvcompose import KVCompose
from press_core.replay.kvzip import KVgrad, KVzip
