"""The formulas: fields and arithmetic, whatever installs them."""

from press_core.presses.adakv import AdaKV, CriticalAdaKV, CriticalKV
from press_core.presses.chunks import Chunk, ChunkKV, EntropyGatedChunkKV
from press_core.presses.composed import Composed, KeyRerotation, PerLayerCompression
from press_core.presses.decoding import (
    CompressionRatioDecoding,
    Decoding,
    EveryTurn,
    PrefillDecoding,
)
from press_core.presses.dms import DMS
from press_core.presses.expected_attention import Cap, ExpectedAttention
from press_core.presses.finch import Finch
from press_core.presses.h2o import H2O, ObservedAttention
from press_core.presses.keydiff import Block, KeyDiff
from press_core.presses.knorm import Knorm
from press_core.presses.lagkv import LagKV
from press_core.presses.leverage import CUR, Compactor, LeverageScore, NonCausalAttn
from press_core.presses.merging import CAM, Merging
from press_core.presses.random import Random
from press_core.presses.simlayerkv import SimLayerKV
from press_core.presses.streaming_llm import StreamingLLM, StreamingLLMDecoding
from press_core.presses.think import ThinK
from press_core.presses.window import RKV, TOVA, DropKV, PyramidKV, SnapKV
