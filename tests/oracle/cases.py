"""The table: every press and wrapper, built the same way here and in kvpress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.oracle import handed
from tests.oracle.running import Context, Press, Run, Setting

Build = Callable[[Any, float], Press]
"""From a package (`hooks_impl`, `patch_impl` or `kvpress`) and a ratio to a press."""

RATIOS = (0.25, 0.5, 0.8)
TARGETS = (30, 50, 70)
TWO_ROWS, ONE_ROW = Context(390, batch=2), Context(390)
LLAMA = Setting()


@dataclass(frozen=True)
class Case:
    """A press that has to keep what kvpress's keeps.

    Attributes:
        build: makes it from a package, which is how a user of kvpress would change one import.
        theirs: makes kvpress's where it has to be built in another way.
        run: what the model is given.
        setting: the model.
        ratios: what `build` is called with.
        note: why the case is not run as the others are, if it is not.
    """

    build: Build
    theirs: Build | None = None
    run: Run = TWO_ROWS
    setting: Setting = LLAMA
    ratios: tuple[float, ...] = RATIOS
    note: str = ""

    @property
    def name(self) -> str:
        """What `build` builds, as Python."""
        return str(self.build(_Names(), _Symbol(0.5)))

    @property
    def presses(self) -> set[str]:
        """Names of the presses in it."""
        names = _Names()
        self.build(names, _Symbol(0.5))
        return names.seen


class _Symbol(float):
    """Any ratio."""

    def __repr__(self) -> str:
        return "r"


class _Names:
    """Stands in for a package: what it builds is the Python that would build it."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.seen.add(name)

        def call(*args: Any, **kwargs: Any) -> _Code:
            parts = [_code(arg) for arg in args]
            parts += [f"{key}={_code(value)}" for key, value in kwargs.items()]
            return _Code(f"{name}({', '.join(parts)})")

        return call


class _Code(str):
    """Python that repeats as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def _code(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | str | list) else "..."


EAGER = Setting(attn_implementation="eager")
FLOAT32 = Setting(dtype=torch.float32)
QWEN3 = Setting("qwen3")
PHI3 = Setting("phi3")

SAME_NUMBERS = "kvpress draws from torch's global generator; it was handed our numbers"

SAME_LEARNED = "What is learned about a model was made up, and handed to both"

DELIMITER = "kvpress's own way to choose a delimiter resizes the model's vocabulary"
READ_AGAIN = (
    "In an unstructured cache kvpress leaves the second reading of the context, which was taken out"
)
COMPOSITES = "Ratios at which no two composite tokens tie: kvpress does not say which it keeps"
GATED = "One row, float32: kvpress takes nothing else. The gates were made up, and handed to both"
REPEAT = "Float32, as kvpress fails on float64. Its tokenizer was one that makes the same prompts"

CASES = [
    # Scores
    Case(
        lambda p, r: p.RandomPress(r),
        run=ONE_ROW,
        setting=FLOAT32,
        note="One row, float32: kvpress draws for every row of the batch, in the dtype of the keys",
    ),
    Case(lambda p, r: p.KnormPress(r)),
    Case(lambda p, r: p.KnormPress(r), setting=QWEN3),
    Case(lambda p, r: p.KnormPress(r), setting=PHI3),
    Case(lambda p, r: p.StreamingLLMPress(r)),
    Case(lambda p, r: p.StreamingLLMPress(r, n_sink=9)),
    Case(lambda p, r: p.SnapKVPress(r)),
    Case(lambda p, r: p.SnapKVPress(r, window_size=16, kernel_size=7)),
    Case(lambda p, r: p.SnapKVPress(r), setting=QWEN3),
    Case(lambda p, r: p.SnapKVPress(r), setting=PHI3),
    Case(lambda p, r: p.PyramidKVPress(r)),
    Case(lambda p, r: p.PyramidKVPress(r, window_size=16, beta=5)),
    Case(lambda p, r: p.PyramidKVPress(r, window_size=16, beta=5), setting=Setting(n_layers=1)),
    Case(lambda p, r: p.TOVAPress(r)),
    Case(lambda p, r: p.TOVAPress(r), setting=QWEN3),
    Case(lambda p, r: p.ObservedAttentionPress(r), setting=EAGER),
    Case(
        lambda p, r: p.ObservedAttentionPress(r),
        setting=EAGER._replace(family="qwen3"),
    ),
    Case(lambda p, r: p.ExpectedAttentionPress(r)),
    Case(lambda p, r: p.ExpectedAttentionPress(r), setting=QWEN3),
    Case(lambda p, r: p.ExpectedAttentionPress(r, use_covariance=False, use_vnorm=False)),
    Case(lambda p, r: p.ExpectedAttentionPress(r, n_future_positions=64, n_sink=0, epsilon=0.02)),
    Case(
        lambda p, r: p.ExpectedAttentionStatsPress(r, stats=handed.STATS),
        theirs=lambda p, r: handed.stats(p.ExpectedAttentionStatsPress(r), handed.STATS),
        note=SAME_LEARNED,
    ),
    Case(
        lambda p, r: p.QFilterPress(r, filters=handed.FILTERS),
        theirs=lambda p, r: handed.q_filters(p.QFilterPress(r), handed.FILTERS),
        note=SAME_LEARNED,
    ),
    Case(
        lambda p, r: p.KVzapPress(r, regressor=handed.MLP),
        theirs=lambda p, r: handed.kvzap(p.KVzapPress(r), handed.MLP),
        note=SAME_LEARNED,
    ),
    Case(
        lambda p, r: p.KVzapPress(r, model_type="linear", regressor=handed.LINEAR),
        theirs=lambda p, r: handed.kvzap(p.KVzapPress(r, model_type="linear"), handed.LINEAR),
        note=SAME_LEARNED,
    ),
    Case(
        lambda p, r: p.LagKVPress(r, lag_size=16),
        run=Context(148, batch=2),
        ratios=(0.27, 0.485, 0.81),
        note="Budgets between two ranks: kvpress does not say which of equal ranks it keeps",
    ),
    Case(lambda p, r: p.LagKVPress(r, lag_size=32, cross_scoring=True)),
    Case(
        lambda p, r: p.LagKVPress(r, n_sink=2, lag_size=200),
        note="Too short a context: sinks and the most recent tokens",
    ),
    Case(lambda p, r: p.KeyDiffPress(r)),
    Case(lambda p, r: p.KeyDiffPress(r), setting=QWEN3),
    Case(
        lambda p, r: p.LeverageScorePress(r),
        theirs=lambda p, r: handed.our_sketch(p.LeverageScorePress(r)),
        note=SAME_NUMBERS,
    ),
    Case(
        lambda p, r: p.LeverageScorePress(r, sketch_dimension=8),
        theirs=lambda p, r: handed.our_sketch(p.LeverageScorePress(r, sketch_dimension=8)),
        note=SAME_NUMBERS,
    ),
    Case(lambda p, r: p.NonCausalAttnPress(r, chunk_size=130)),
    Case(lambda p, r: p.CompactorPress(r, chunk_size=126), run=ONE_ROW),
    Case(lambda p, r: p.CompactorPress(r, chunk_size=126, blending=0.7), run=ONE_ROW),
    Case(lambda p, r: p.CapPress(r)),
    Case(lambda p, r: p.CapPress(r, tau=1.0, n_future_positions=64, n_sink=9, epsilon=0.1)),
    Case(lambda p, r: p.CapPress(r), setting=QWEN3),
    Case(lambda p, r: p.CURPress(r)),
    Case(lambda p, r: p.CURPress(r, leverage_type="key")),
    Case(lambda p, r: p.CURPress(r, leverage_type="value", num_sinks=9)),
    Case(lambda p, r: p.CURPress(r, leverage_type="kv_avg", local_window_size=50)),
    Case(lambda p, r: p.CURPress(r, use_local_approximation=False)),
    Case(
        lambda p, r: p.CURPress(r, use_random_leverage=True),
        theirs=lambda p, r: handed.our_sketch(p.CURPress(r, use_random_leverage=True)),
        note=SAME_NUMBERS,
    ),
    Case(lambda p, r: p.CriticalKVPress(p.KnormPress(r))),
    Case(lambda p, r: p.CriticalKVPress(p.SnapKVPress(r, window_size=16), first_stage_ratio=0.3)),
    Case(lambda p, r: p.CriticalKVPress(p.ExpectedAttentionPress(r), epsilon=0.1)),
    # Wrappers that keep as many tokens in every head
    Case(lambda p, r: p.KeyRerotationPress(p.KnormPress(r))),
    Case(lambda p, r: p.KeyRerotationPress(p.SnapKVPress(r)), setting=QWEN3),
    Case(lambda p, r: p.KeyRerotationPress(p.StreamingLLMPress(r)), setting=PHI3),
    Case(lambda p, r: p.ComposedPress([p.KnormPress(r), p.KeyDiffPress(0.3)])),
    Case(lambda p, r: p.ComposedPress([p.SnapKVPress(r), p.KnormPress(0.3)])),
    Case(lambda p, r: p.ComposedPress([p.KeyDiffPress(r), p.KnormPress(r), p.KeyDiffPress(r)])),
    Case(lambda p, r: p.ComposedPress([p.ThinKPress(0.3), p.KnormPress(r)])),
    Case(lambda p, r: p.ChunkPress(p.KnormPress(r), chunk_length=100)),
    Case(lambda p, r: p.ChunkPress(p.KeyDiffPress(r), chunk_length=64)),
    Case(lambda p, r: p.ChunkPress(p.StreamingLLMPress(r), chunk_length=100)),
    Case(lambda p, r: p.ChunkPress(p.SnapKVPress(r, window_size=16))),
    Case(lambda p, r: p.ChunkKVPress(p.KnormPress(r)), run=ONE_ROW),
    Case(lambda p, r: p.ChunkKVPress(p.SnapKVPress(r)), run=ONE_ROW),
    Case(
        lambda p, r: p.ChunkKVPress(p.ExpectedAttentionPress(r), chunk_length=7), run=Context(390)
    ),
    Case(lambda p, r: p.ChunkKVPress(p.TOVAPress(r), chunk_length=500), run=ONE_ROW),
    Case(lambda p, r: p.EntropyGatedChunkKVPress(p.SnapKVPress(r)), run=ONE_ROW),
    Case(
        lambda p, r: p.EntropyGatedChunkKVPress(
            p.ExpectedAttentionPress(r), chunk_length=7, low_entropy_chunk_length=4
        ),
        run=ONE_ROW,
    ),
    Case(lambda p, r: p.EntropyGatedChunkKVPress(p.KeyDiffPress(r)), run=ONE_ROW),
    Case(lambda p, r: p.EntropyGatedChunkKVPress(p.TOVAPress(r), chunk_length=500), run=ONE_ROW),
    Case(lambda p, r: p.MergingPress(p.KnormPress(r))),
    Case(lambda p, r: p.MergingPress(p.SnapKVPress(r)), setting=QWEN3),
    Case(lambda p, r: p.MergingPress(p.KeyDiffPress(r), similarity_threshold=0.3)),
    Case(lambda p, r: p.MergingPress(p.ExpectedAttentionPress(r), merge_fraction=0.35)),
    Case(
        lambda p, r: p.MergingPress(
            p.SnapKVPress(r), similarity_threshold=0.2, merge_fraction=0.75
        ),
    ),
    Case(lambda p, r: p.MergingPress(p.KnormPress(r), merge_fraction=0.5), run=Context(21)),
    Case(lambda p, r: p.MergingPress(p.KnormPress(r), merge_fraction=0.5), run=Context(27)),
    Case(lambda p, r: p.BlockPress(p.KeyDiffPress(r))),
    Case(lambda p, r: p.BlockPress(p.KnormPress(r), block_size=50)),
    Case(lambda p, r: p.PerLayerCompressionPress(p.KnormPress(), [r, 0.4, 0.0])),
    Case(lambda p, r: p.PerLayerCompressionPress(p.SnapKVPress(), [0.1, r, 0.4])),
    Case(lambda p, r: p.PerLayerCompressionPress(p.ExpectedAttentionPress(), [r, r, r])),
    # Wrappers and presses that let heads differ
    Case(lambda p, r: p.AdaKVPress(p.KnormPress(r))),
    Case(lambda p, r: p.AdaKVPress(p.SnapKVPress(r))),
    Case(lambda p, r: p.AdaKVPress(p.SnapKVPress(r, window_size=16), alpha_safeguard=0.5)),
    Case(lambda p, r: p.AdaKVPress(p.ExpectedAttentionPress(r, epsilon=1e-2)), setting=QWEN3),
    Case(lambda p, r: p.AdaKVPress(p.CriticalKVPress(p.SnapKVPress(r, window_size=16)))),
    Case(lambda p, r: p.CriticalAdaKVPress(p.KnormPress(r)), run=ONE_ROW),
    Case(lambda p, r: p.CriticalAdaKVPress(p.SnapKVPress(r)), run=ONE_ROW),
    Case(
        lambda p, r: p.CriticalAdaKVPress(
            p.ExpectedAttentionPress(r), alpha_safeguard=0.4, first_stage_ratio=0.2
        ),
        run=ONE_ROW,
    ),
    Case(lambda p, r: p.DMSPress(p.KnormPress(), threshold=r), ratios=(-4.3, -4.0, -3.7)),
    Case(
        lambda p, r: p.DMSPress(p.KeyDiffPress(), threshold=r, sliding_window_size=30),
        ratios=(-0.2, 0.0, 0.2),
    ),
    Case(
        lambda p, r: p.DMSPress(p.KnormPress(), threshold=r, sliding_window_size=20, decoding=True),
        run=Context(120, then=40),
        ratios=(-4.3, -4.0, -3.7),
    ),
    Case(
        lambda p, r: p.DMSPress(p.KVzapPress(regressor=handed.MLP), threshold=r, decoding=True),
        theirs=lambda p, r: handed.kvzap(
            p.DMSPress(p.KVzapPress(), threshold=r, decoding=True), handed.MLP
        ),
        run=Context(200, then=30),
        ratios=(-10.0, 0.0, 10.0),
        note=SAME_LEARNED,
    ),
    # While decoding
    Case(
        lambda p, r: p.DecodingPress(p.KnormPress(), compression_interval=7, target_size=r),
        run=Context(60, then=30),
        ratios=TARGETS,
    ),
    Case(
        lambda p, r: p.DecodingPress(p.KeyDiffPress(), compression_interval=5, target_size=r),
        run=Context(60, then=30),
        ratios=TARGETS,
    ),
    Case(
        lambda p, r: p.DecodingPress(p.TOVAPress(), compression_interval=5, target_size=r),
        run=Context(60, then=30),
        ratios=TARGETS,
    ),
    Case(
        lambda p, r: p.PrefillDecodingPress(
            p.SnapKVPress(r, window_size=16),
            p.DecodingPress(p.KnormPress(), compression_interval=6, target_size=20),
        ),
        run=Context(90, then=30),
    ),
    Case(
        lambda p, r: p.CompressionRatioDecodingPress(
            p.KnormPress(), compression_interval=7, target_compression_ratio=r
        ),
        run=Context(60, then=30),
    ),
    Case(
        lambda p, r: p.CompressionRatioDecodingPress(
            p.KeyDiffPress(), compression_interval=4, target_compression_ratio=r
        ),
        run=Context(60, then=30),
    ),
    Case(
        lambda p, r: p.CAMPress(
            p.KnormPress(), compression_interval=7, target_size=r, merge_budget=4, seed=0
        ),
        theirs=lambda p, r: handed.our_draws(
            p.CAMPress(p.KnormPress(), compression_interval=7, target_size=r, merge_budget=4)
        ),
        run=Context(60, then=30),
        ratios=(30, 50, 60),
        note=SAME_NUMBERS,
    ),
    # Own logic
    Case(lambda p, r: p.ThinKPress(r)),
    Case(lambda p, r: p.ThinKPress(r, window_size=7), setting=QWEN3),
    Case(
        lambda p, r: p.SimLayerKVPress(lazy_threshold=r, n_recent=100),
        run=ONE_ROW,
        ratios=(0.25, 0.27, 0.3),
    ),
    Case(
        lambda p, r: p.SimLayerKVPress(lazy_threshold=r, n_last=8, n_recent=50, n_initial=0),
        run=ONE_ROW,
        ratios=(0.12, 0.125, 0.13),
    ),
    *(
        Case(
            lambda p, r: p.DuoAttentionPress(
                r, head_scores=handed.HEAD_SCORES, sink_size=10, recent_size=40
            ),
            theirs=lambda p, r: handed.head_scores(
                p.DuoAttentionPress(r), handed.HEAD_SCORES, 10, 40
            ),
            run=run,
            note=SAME_LEARNED,
        )
        for run in (TWO_ROWS, Context(100, then=7))
    ),
    Case(
        lambda p, r: p.FinchPress(r, delimiter_token_id=handed.DELIMITER),
        theirs=lambda p, r: handed.delimiter(p.FinchPress(r)),
        run=handed.Question(390, 30),
        note=DELIMITER,
    ),
    Case(
        lambda p, r: p.FinchPress(
            r, normalize_scores=False, rerotate_keys=False, delimiter_token_id=handed.DELIMITER
        ),
        theirs=lambda p, r: handed.delimiter(
            p.FinchPress(r, normalize_scores=False, rerotate_keys=False)
        ),
        run=handed.Question(390, 9),
        note=DELIMITER,
    ),
    Case(
        lambda p, r: p.FinchPress(r, chunk_length=100, delimiter_token_id=handed.DELIMITER),
        theirs=lambda p, r: handed.delimiter(p.FinchPress(r, chunk_length=100)),
        run=handed.Question(390, 12),
        note=DELIMITER,
    ),
    Case(
        lambda p, r: p.FastKVzipPress(r, gates=handed.GATES),
        theirs=lambda p, r: handed.gates(p.FastKVzipPress(r), handed.GATES),
        run=ONE_ROW,
        setting=FLOAT32,
        note=GATED,
    ),
    Case(
        lambda p, r: p.FastKVzipPress(r, layerwise=True, gates=handed.GATES),
        theirs=lambda p, r: handed.gates(p.FastKVzipPress(r, layerwise=True), handed.GATES),
        run=ONE_ROW,
        setting=FLOAT32,
        note=GATED,
    ),
    Case(
        lambda p, r: p.FastKVzipPress(r, n_sink=9, window_ratio=0.1, gates=handed.GATES),
        theirs=lambda p, r: handed.gates(
            p.FastKVzipPress(r, n_sink=9, window_ratio=0.1), handed.GATES
        ),
        run=ONE_ROW,
        setting=FLOAT32._replace(family="qwen3"),
        note=GATED,
    ),
    Case(
        lambda p, r: p.LUKVPress(compression_ratio=r, curves=handed.CURVES),
        theirs=lambda p, r: handed.curves(p.LUKVPress(compression_ratio=r), handed.CURVES),
        note=SAME_LEARNED,
    ),
    Case(
        lambda p, r: p.LUKVPress(
            p.SnapKVPress(window_size=16),
            compression_ratio=r,
            sink=0,
            window=9,
            curves=handed.CURVES,
        ),
        theirs=lambda p, r: handed.curves(
            p.LUKVPress(p.SnapKVPress(window_size=16), compression_ratio=r, sink=0, window=9),
            handed.CURVES,
        ),
        ratios=(0.255, 0.637, 0.904),
        note=SAME_LEARNED,
    ),
    Case(
        lambda p, r: p.LUKVPress(p.KnormPress(), compression_ratio=r, curves=handed.CURVES),
        theirs=lambda p, r: handed.curves(
            p.LUKVPress(p.KnormPress(), compression_ratio=r), handed.CURVES
        ),
        run=Context(41),
        ratios=(0.9, 0.96, 0.99),
        note=SAME_LEARNED,
    ),
    Case(
        lambda p, r: p.KVzipPress(r, prompts=handed.PROMPTS),
        theirs=lambda p, r: p.KVzipPress(r),
        run=handed.Repeated(200),
        setting=FLOAT32,
        note=REPEAT,
    ),
    Case(
        lambda p, r: p.KVzipPress(r, layerwise=True, n_sink=9, prompts=handed.PROMPTS),
        theirs=lambda p, r: p.KVzipPress(r, layerwise=True, n_sink=9),
        run=handed.Repeated(200),
        setting=FLOAT32,
        note=REPEAT,
    ),
    Case(
        lambda p, r: p.KVzipPress(
            r, kvzip_plus_normalization=True, chunk_size=70, prompts=handed.PROMPTS
        ),
        theirs=lambda p, r: p.KVzipPress(r, kvzip_plus_normalization=True, chunk_size=70),
        run=handed.Repeated(200),
        setting=FLOAT32,
        note=REPEAT,
    ),
    *(
        Case(
            lambda p, r, options=options: p.KVComposePress(compression_ratio=r, **options),
            run=Context(120),
            setting=setting,
            note=COMPOSITES,
        )
        for options, setting in (
            ({}, LLAMA),
            ({}, QWEN3),
            ({"agg_task": "mean", "agg_group": "max", "agg_head": "max"}, LLAMA),
            ({"add_mean_across_heads": False, "keep_token_lower_bound": 20}, LLAMA),
        )
    ),
    *(
        Case(
            lambda p, r, options=options: p.KVComposePress(
                compression_ratio=r, structured=False, **options
            ),
            run=handed.ReadAgain(120),
            note=READ_AGAIN,
        )
        for options in ({}, {"agg_group": "max", "keep_token_lower_bound": 10})
    ),
    *(
        Case(
            lambda p, r, options=options: p.KVgradPress(r, **options, prompts=handed.PROMPTS),
            theirs=lambda p, r, options=options: p.KVgradPress(r, **options),
            run=handed.Repeated(200),
            setting=setting,
            note=REPEAT,
        )
        for options, setting in (
            ({}, FLOAT32),
            ({"layerwise": True, "n_sink": 9}, FLOAT32),
            ({"chunk_size": 70}, FLOAT32._replace(family="qwen3")),
        )
    ),
    *(
        Case(
            lambda p, r, options=options: p.RestoreKVPress(
                r, **options, prompts=handed.PROMPTS, adapter=handed.ADAPTER
            ),
            theirs=lambda p, r, options=options: p.RestoreKVPress(r, **options),
            run=handed.Restored(200),
            setting=FLOAT32,
            note=f"{SAME_LEARNED}. {REPEAT}",
        )
        for options in ({}, {"layerwise": True}, {"kvzip_plus_normalization": True})
    ),
]
"""Every case."""
