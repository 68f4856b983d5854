"""The table: every press and wrapper, built from the same text here and in kvpress."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import hooks_impl
import patch_impl
from tests.oracle import handed
from tests.oracle.running import Context, Run, Setting

PACKAGES: dict[str, Mapping[str, Any]] = {
    "hooks": hooks_impl.PRESSES,
    "patches": patch_impl.PRESSES,
    "kvpress": handed.PRESSES,
}
MECHANISMS = "hooks", "patches"
RATIOS = (0.25, 0.5, 0.8)
TWO_ROWS, ONE_ROW = Context(390, batch=2), Context(390)
LLAMA, QWEN3, PHI3 = Setting(), Setting("qwen3"), Setting("phi3")
EAGER, FLOAT32 = Setting(attn_implementation="eager"), Setting(dtype=torch.float32)


def press_of(text, whose, ratio, given=handed.GIVEN):
    """The press that the Python `text` builds from a package, in which `r` is the ratio."""
    return eval(text, {**PACKAGES[whose], **given, "r": ratio})


@dataclass(frozen=True)
class Case:
    """A press that has to keep what kvpress's keeps.

    Attributes:
        press: see `press_of`; a user of kvpress would change one import.
        run: what the model is given.
        setting: the model.
        ratios: what `r` is.
        note: why the case is not run as the others are, if it is not.
    """

    press: str
    run: Run = TWO_ROWS
    setting: Setting = LLAMA
    ratios: tuple[float, ...] = RATIOS
    note: str = ""

    @property
    def presses(self):
        """Names of the presses in it."""
        return set(re.findall(r"\w+Press\b", self.press))


SAME_NUMBERS = "kvpress draws from torch's global generator; it was handed our numbers"
SAME_LEARNED = "What is learned about a model was made up, and handed to both"
DELIMITER = "kvpress's own way to choose a delimiter resizes the model's vocabulary"
READ_AGAIN = (
    "In an unstructured cache kvpress leaves the second reading of the context, which was taken out"
)
COMPOSITES = "Ratios at which no two composite tokens tie: kvpress does not say which it keeps"
GATED = "One row, float32: kvpress takes nothing else. The gates were made up, and handed to both"
REPEAT = "Float32, as kvpress fails on float64. Its tokenizer was one that makes the same prompts"


def cases(*presses, **options):
    """Cases that are alike but for their press."""
    return [Case(press, **options) for press in presses]


CASES = [
    # Scores
    Case(
        "RandomPress(r)",
        run=ONE_ROW,
        setting=FLOAT32,
        note="One row, float32: kvpress draws for every row of the batch, in the dtype of the keys",
    ),
    *(Case("KnormPress(r)", setting=setting) for setting in (LLAMA, QWEN3, PHI3)),
    *cases("StreamingLLMPress(r)", "StreamingLLMPress(r, n_sink=9)"),
    *cases("SnapKVPress(r)", "SnapKVPress(r, window_size=16, kernel_size=7)"),
    *(Case("SnapKVPress(r)", setting=setting) for setting in (QWEN3, PHI3)),
    *cases("PyramidKVPress(r)", "PyramidKVPress(r, window_size=16, beta=5)"),
    Case("PyramidKVPress(r, window_size=16, beta=5)", setting=Setting(n_layers=1)),
    *(Case("TOVAPress(r)", setting=setting) for setting in (LLAMA, QWEN3)),
    Case("ObservedAttentionPress(r)", setting=EAGER),
    Case("ObservedAttentionPress(r)", setting=EAGER._replace(family="qwen3")),
    *(Case("ExpectedAttentionPress(r)", setting=setting) for setting in (LLAMA, QWEN3)),
    *cases(
        "ExpectedAttentionPress(r, use_covariance=False, use_vnorm=False)",
        "ExpectedAttentionPress(r, n_future_positions=64, n_sink=0, epsilon=0.02)",
    ),
    *cases(
        "ExpectedAttentionStatsPress(r, stats=STATS)",
        "QFilterPress(r, filters=FILTERS)",
        "KVzapPress(r, regressor=MLP)",
        "KVzapPress(r, model_type='linear', regressor=LINEAR)",
        note=SAME_LEARNED,
    ),
    Case(
        "LagKVPress(r, lag_size=16)",
        run=Context(148, batch=2),
        ratios=(0.27, 0.485, 0.81),
        note="Budgets between two ranks: kvpress does not say which of equal ranks it keeps",
    ),
    Case("LagKVPress(r, lag_size=32, cross_scoring=True)"),
    Case(
        "LagKVPress(r, n_sink=2, lag_size=200)",
        note="Too short a context: sinks and the most recent tokens",
    ),
    *(Case("KeyDiffPress(r)", setting=setting) for setting in (LLAMA, QWEN3)),
    *cases(
        "LeverageScorePress(r)",
        "LeverageScorePress(r, sketch_dimension=8)",
        note=SAME_NUMBERS,
    ),
    Case("NonCausalAttnPress(r, chunk_size=130)"),
    *cases(
        "CompactorPress(r, chunk_size=126)",
        "CompactorPress(r, chunk_size=126, blending=0.7)",
        run=ONE_ROW,
    ),
    *cases("CapPress(r)", "CapPress(r, tau=1.0, n_future_positions=64, n_sink=9, epsilon=0.1)"),
    Case("CapPress(r)", setting=QWEN3),
    *cases(
        "CURPress(r)",
        "CURPress(r, leverage_type='key')",
        "CURPress(r, leverage_type='value', num_sinks=9)",
        "CURPress(r, leverage_type='kv_avg', local_window_size=50)",
        "CURPress(r, use_local_approximation=False)",
    ),
    Case("CURPress(r, use_random_leverage=True)", note=SAME_NUMBERS),
    *cases(
        "CriticalKVPress(KnormPress(r))",
        "CriticalKVPress(SnapKVPress(r, window_size=16), first_stage_ratio=0.3)",
        "CriticalKVPress(ExpectedAttentionPress(r), epsilon=0.1)",
    ),
    # Wrappers that keep as many tokens in every head
    Case("KeyRerotationPress(KnormPress(r))"),
    Case("KeyRerotationPress(SnapKVPress(r))", setting=QWEN3),
    Case("KeyRerotationPress(StreamingLLMPress(r))", setting=PHI3),
    *cases(
        "ComposedPress([KnormPress(r), KeyDiffPress(0.3)])",
        "ComposedPress([SnapKVPress(r), KnormPress(0.3)])",
        "ComposedPress([KeyDiffPress(r), KnormPress(r), KeyDiffPress(r)])",
        "ComposedPress([ThinKPress(0.3), KnormPress(r)])",
        "ChunkPress(KnormPress(r), chunk_length=100)",
        "ChunkPress(KeyDiffPress(r), chunk_length=64)",
        "ChunkPress(StreamingLLMPress(r), chunk_length=100)",
        "ChunkPress(SnapKVPress(r, window_size=16))",
    ),
    *cases(
        "ChunkKVPress(KnormPress(r))",
        "ChunkKVPress(SnapKVPress(r))",
        "ChunkKVPress(ExpectedAttentionPress(r), chunk_length=7)",
        "ChunkKVPress(TOVAPress(r), chunk_length=500)",
        "EntropyGatedChunkKVPress(SnapKVPress(r))",
        "EntropyGatedChunkKVPress(ExpectedAttentionPress(r), 7, low_entropy_chunk_length=4)",
        "EntropyGatedChunkKVPress(KeyDiffPress(r))",
        "EntropyGatedChunkKVPress(TOVAPress(r), chunk_length=500)",
        run=ONE_ROW,
    ),
    Case("MergingPress(KnormPress(r))"),
    Case("MergingPress(SnapKVPress(r))", setting=QWEN3),
    *cases(
        "MergingPress(KeyDiffPress(r), similarity_threshold=0.3)",
        "MergingPress(ExpectedAttentionPress(r), merge_fraction=0.35)",
        "MergingPress(SnapKVPress(r), similarity_threshold=0.2, merge_fraction=0.75)",
    ),
    *(Case("MergingPress(KnormPress(r), merge_fraction=0.5)", run=Context(n)) for n in (21, 27)),
    *cases(
        "BlockPress(KeyDiffPress(r))",
        "BlockPress(KnormPress(r), block_size=50)",
        "PerLayerCompressionPress(KnormPress(), [r, 0.4, 0.0])",
        "PerLayerCompressionPress(SnapKVPress(), [0.1, r, 0.4])",
        "PerLayerCompressionPress(ExpectedAttentionPress(), [r, r, r])",
    ),
    # Wrappers and presses that let heads differ
    *cases(
        "AdaKVPress(KnormPress(r))",
        "AdaKVPress(SnapKVPress(r))",
        "AdaKVPress(SnapKVPress(r, window_size=16), alpha_safeguard=0.5)",
        "AdaKVPress(CriticalKVPress(SnapKVPress(r, window_size=16)))",
    ),
    Case("AdaKVPress(ExpectedAttentionPress(r, epsilon=1e-2))", setting=QWEN3),
    *cases(
        "CriticalAdaKVPress(KnormPress(r))",
        "CriticalAdaKVPress(SnapKVPress(r))",
        "CriticalAdaKVPress(ExpectedAttentionPress(r), alpha_safeguard=0.4, first_stage_ratio=0.2)",
        run=ONE_ROW,
    ),
    Case("DMSPress(KnormPress(), threshold=r)", ratios=(-4.3, -4.0, -3.7)),
    Case("DMSPress(KeyDiffPress(), threshold=r, sliding_window_size=30)", ratios=(-0.2, 0.0, 0.2)),
    Case(
        "DMSPress(KnormPress(), threshold=r, sliding_window_size=20, decoding=True)",
        run=Context(120, then=40),
        ratios=(-4.3, -4.0, -3.7),
    ),
    Case(
        "DMSPress(KVzapPress(regressor=MLP), threshold=r, decoding=True)",
        run=Context(200, then=30),
        ratios=(-10.0, 0.0, 10.0),
        note=SAME_LEARNED,
    ),
    # While decoding
    *cases(
        "DecodingPress(KnormPress(), compression_interval=7, target_size=r)",
        "DecodingPress(KeyDiffPress(), compression_interval=5, target_size=r)",
        "DecodingPress(TOVAPress(), compression_interval=5, target_size=r)",
        run=Context(60, then=30),
        ratios=(30, 50, 70),
    ),
    Case(
        "PrefillDecodingPress(SnapKVPress(r, window_size=16), "
        "DecodingPress(KnormPress(), compression_interval=6, target_size=20))",
        run=Context(90, then=30),
    ),
    *(
        Case(
            f"CompressionRatioDecodingPress({base}(), {interval}, target_compression_ratio=r)",
            run=Context(60, then=30),
        )
        for base, interval in (("KnormPress", 7), ("KeyDiffPress", 4))
    ),
    Case(
        "CAMPress(KnormPress(), 7, target_size=r, merge_budget=4, seed=0)",
        run=Context(60, then=30),
        ratios=(30, 50, 60),
        note=SAME_NUMBERS,
    ),
    # Own logic
    Case("ThinKPress(r)"),
    Case("ThinKPress(r, window_size=7)", setting=QWEN3),
    Case("SimLayerKVPress(lazy_threshold=r, n_recent=100)", run=ONE_ROW, ratios=(0.25, 0.27, 0.3)),
    Case(
        "SimLayerKVPress(lazy_threshold=r, n_last=8, n_recent=50, n_initial=0)",
        run=ONE_ROW,
        ratios=(0.12, 0.125, 0.13),
    ),
    *(
        Case(
            "DuoAttentionPress(r, head_scores=HEAD_SCORES, sink_size=10, recent_size=40)",
            run=run,
            note=SAME_LEARNED,
        )
        for run in (TWO_ROWS, Context(100, then=7))
    ),
    *(
        Case(
            f"FinchPress(r, {options}delimiter_token_id=DELIMITER)",
            run=handed.Question(390, length),
            note=DELIMITER,
        )
        for options, length in (
            ("", 30),
            ("normalize_scores=False, rerotate_keys=False, ", 9),
            ("chunk_length=100, ", 12),
        )
    ),
    *(
        Case(f"FastKVzipPress(r, {options}gates=GATES)", ONE_ROW, setting, note=GATED)
        for options, setting in (
            ("", FLOAT32),
            ("layerwise=True, ", FLOAT32),
            ("n_sink=9, window_ratio=0.1, ", FLOAT32._replace(family="qwen3")),
        )
    ),
    Case("LUKVPress(compression_ratio=r, curves=CURVES)", note=SAME_LEARNED),
    Case(
        "LUKVPress(SnapKVPress(window_size=16), r, sink=0, window=9, curves=CURVES)",
        ratios=(0.255, 0.637, 0.904),
        note=SAME_LEARNED,
    ),
    Case(
        "LUKVPress(KnormPress(), compression_ratio=r, curves=CURVES)",
        run=Context(41),
        ratios=(0.9, 0.96, 0.99),
        note=SAME_LEARNED,
    ),
    *cases(
        "KVzipPress(r, prompts=PROMPTS)",
        "KVzipPress(r, layerwise=True, n_sink=9, prompts=PROMPTS)",
        "KVzipPress(r, kvzip_plus_normalization=True, chunk_size=70, prompts=PROMPTS)",
        run=handed.Repeated(200),
        setting=FLOAT32,
        note=REPEAT,
    ),
    *(
        Case(
            f"KVComposePress(compression_ratio=r{options})", Context(120), setting, note=COMPOSITES
        )
        for options, setting in (
            ("", LLAMA),
            ("", QWEN3),
            (", agg_task='mean', agg_group='max', agg_head='max'", LLAMA),
            (", add_mean_across_heads=False, keep_token_lower_bound=20", LLAMA),
        )
    ),
    *cases(
        "KVComposePress(compression_ratio=r, structured=False)",
        "KVComposePress(compression_ratio=r, structured=False, "
        "agg_group='max', keep_token_lower_bound=10)",
        run=handed.ReadAgain(120),
        note=READ_AGAIN,
    ),
    *(
        Case(
            f"KVgradPress(r, {options}prompts=PROMPTS)",
            handed.Repeated(200),
            setting,
            note=REPEAT,
        )
        for options, setting in (
            ("", FLOAT32),
            ("layerwise=True, n_sink=9, ", FLOAT32),
            ("chunk_size=70, ", FLOAT32._replace(family="qwen3")),
        )
    ),
    *cases(
        "RestoreKVPress(r, prompts=PROMPTS, adapter=ADAPTER)",
        "RestoreKVPress(r, layerwise=True, prompts=PROMPTS, adapter=ADAPTER)",
        "RestoreKVPress(r, kvzip_plus_normalization=True, prompts=PROMPTS, adapter=ADAPTER)",
        run=handed.Restored(200),
        setting=FLOAT32,
        note=f"{SAME_LEARNED}. {REPEAT}",
    ),
]
"""Every case."""
