"""Time and memory that presses take, against kvpress: `python -m tests.oracle.timing`.

What is measured is what a press adds to a model: all hooks that its scope registers, whatever they
are for, and the end of the scope (where KVzip of kvpress does its work), on a `StandIn` of 2
layers, 16 query and 4 KV heads of 64, float32. Both sides run in turn, round by round; times are
the medians per layer, the ratio is the median of the ratios of the rounds, `low` and `high` its 95%
bootstrap interval. Memory is what is allocated at most beyond what was there before, once. Each
press and length has a process of its own: how long a large temporary takes depends on what was
allocated before.

kvpress evicts from single heads by a mask that it works in at every later step. So of the presses
that do, there are two rows: one as of all others, and one with 16 tokens decoded, in which cache
and attention count on both sides. (Not of KVzip, which in kvpress evicts only after decoding.)

The floor is what no press can do without that evicts half of a layer: the best half of some scores,
and the keys and values there. How often a press takes that long tells whether its arithmetic or
what is around it decides.
"""

from __future__ import annotations

import csv
import gc
import math
import os
import statistics
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from time import perf_counter
from typing import Any
from unittest.mock import patch

import kvpress
import torch
from torch import Tensor

import hooks_impl
from experiments.framework.intervals import LEAST, median_interval
from press_core.learned.duo_attention import HeadScores
from press_core.learned.expected_attention_stats import ExpectedAttentionStats
from press_core.learned.fast_kvzip import KVzipGates
from press_core.learned.kvzap import KVzapRegressor
from press_core.learned.lukv import BudgetCurves
from press_core.learned.qfilter import QFilters
from tests.oracle import handed
from tests.oracle.cases import Build
from tests.oracle.differences import NOT_IN_KVPRESS
from tests.oracle.stand_in import N_HEADS, N_KV, N_LAYERS, WIDTH, Clock, D, Memory, StandIn

LENGTH = 8192
"""Tokens of the context."""

ROUNDS, SECONDS = 9, 1.5
"""Rounds per press, and after how much time a press gets no more (but three)."""

DECODED = 16
"""Tokens decoded with `headwise` presses."""


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


FILTERS = QFilters(random(N_LAYERS, N_KV, D))
STATS = ExpectedAttentionStats(
    random(N_LAYERS, N_HEADS, D), torch.eye(D).expand(N_LAYERS, N_HEADS, D, D)
)
HEAD_SCORES = HeadScores(random(N_LAYERS, N_KV))
REGRESSOR = KVzapRegressor(
    random(N_LAYERS, N_KV, WIDTH // 8),
    random(N_LAYERS, N_KV),
    random(N_LAYERS, WIDTH // 8, WIDTH),
    random(N_LAYERS, WIDTH // 8),
)
GATES = KVzipGates(
    random(N_LAYERS, N_HEADS, 16, WIDTH) / WIDTH,
    random(N_LAYERS, N_HEADS, 16),
    random(N_LAYERS, N_KV, 16, WIDTH) / WIDTH,
    torch.ones(N_LAYERS, 16),
    torch.ones(N_LAYERS, 16),
    random(N_LAYERS, N_KV, 16, 16),
    random(N_LAYERS, N_HEADS),
)
CURVES = BudgetCurves(
    torch.linspace(0.3, 0.7, N_LAYERS * N_KV).view(1, N_LAYERS, -1).repeat(99, 1, 1)
)


@dataclass(frozen=True)
class Timed:
    """A press to be timed.

    Attributes:
        build: makes it from a package.
        theirs: makes kvpress's where that takes something else.
        then: tokens decoded afterwards, for presses that act then.
        delimiter_before: length of the question at the end, with a delimiter before it.
        eager: whether kvpress needs attention weights.
        headwise: whether kvpress leaves the evicting to the steps that follow.
    """

    build: Build
    theirs: Build | None = None
    then: int = 0
    delimiter_before: int = 0
    eager: bool = False
    headwise: bool = False


def snap(package: Any) -> Any:
    return package.SnapKVPress(0.5)


TIMED = {
    "RandomPress": Timed(lambda p, n: p.RandomPress(0.5)),
    "KnormPress": Timed(lambda p, n: p.KnormPress(0.5)),
    "StreamingLLMPress": Timed(lambda p, n: p.StreamingLLMPress(0.5)),
    "SnapKVPress": Timed(lambda p, n: snap(p)),
    "PyramidKVPress": Timed(lambda p, n: p.PyramidKVPress(0.5)),
    "TOVAPress": Timed(lambda p, n: p.TOVAPress(0.5)),
    "ObservedAttentionPress": Timed(lambda p, n: p.ObservedAttentionPress(0.5), eager=True),
    "ExpectedAttentionPress": Timed(lambda p, n: p.ExpectedAttentionPress(0.5)),
    "ExpectedAttentionStatsPress": Timed(
        lambda p, n: p.ExpectedAttentionStatsPress(0.5, stats=STATS),
        lambda p, n: handed.stats(p.ExpectedAttentionStatsPress(0.5), STATS),
    ),
    "QFilterPress": Timed(
        lambda p, n: p.QFilterPress(0.5, filters=FILTERS),
        lambda p, n: handed.q_filters(p.QFilterPress(0.5), FILTERS),
    ),
    "LagKVPress": Timed(lambda p, n: p.LagKVPress(0.5)),
    "KeyDiffPress": Timed(lambda p, n: p.KeyDiffPress(0.5)),
    "LeverageScorePress": Timed(lambda p, n: p.LeverageScorePress(0.5)),
    "NonCausalAttnPress": Timed(lambda p, n: p.NonCausalAttnPress(0.5)),
    "CompactorPress": Timed(lambda p, n: p.CompactorPress(0.5)),
    "CapPress": Timed(lambda p, n: p.CapPress(0.5)),
    "CURPress": Timed(lambda p, n: p.CURPress(0.5)),
    "KVzapPress": Timed(
        lambda p, n: p.KVzapPress(0.5, regressor=REGRESSOR),
        lambda p, n: handed.kvzap(p.KVzapPress(0.5), REGRESSOR),
    ),
    "CriticalKVPress": Timed(lambda p, n: p.CriticalKVPress(snap(p))),
    "ComposedPress": Timed(lambda p, n: p.ComposedPress([snap(p), p.KnormPress(0.5)])),
    "KeyRerotationPress": Timed(lambda p, n: p.KeyRerotationPress(snap(p))),
    "ChunkPress": Timed(lambda p, n: p.ChunkPress(snap(p))),
    "ChunkKVPress": Timed(lambda p, n: p.ChunkKVPress(snap(p))),
    "EntropyGatedChunkKVPress": Timed(lambda p, n: p.EntropyGatedChunkKVPress(snap(p))),
    "MergingPress": Timed(lambda p, n: p.MergingPress(snap(p))),
    "BlockPress": Timed(lambda p, n: p.BlockPress(p.KeyDiffPress(0.5))),
    "PerLayerCompressionPress": Timed(lambda p, n: p.PerLayerCompressionPress(snap(p), [0.3, 0.7])),
    "AdaKVPress": Timed(lambda p, n: p.AdaKVPress(snap(p)), headwise=True),
    "CriticalAdaKVPress": Timed(lambda p, n: p.CriticalAdaKVPress(snap(p)), headwise=True),
    "DMSPress": Timed(lambda p, n: p.DMSPress(p.KnormPress(), threshold=-8.0), headwise=True),
    "DecodingPress": Timed(
        lambda p, n: p.DecodingPress(p.KnormPress(), compression_interval=4, target_size=n // 2),
        then=4,
    ),
    "CAMPress": Timed(
        lambda p, n: p.CAMPress(p.KnormPress(), compression_interval=4, target_size=n // 2),
        then=4,
    ),
    "CompressionRatioDecodingPress": Timed(
        lambda p, n: p.CompressionRatioDecodingPress(p.KnormPress(), compression_interval=4),
        then=4,
    ),
    "PrefillDecodingPress": Timed(
        lambda p, n: p.PrefillDecodingPress(
            snap(p), p.DecodingPress(p.KnormPress(), compression_interval=4, target_size=n // 4)
        ),
        then=4,
    ),
    "ThinKPress": Timed(lambda p, n: p.ThinKPress(0.5)),
    "SimLayerKVPress": Timed(lambda p, n: p.SimLayerKVPress(lazy_threshold=0.0)),
    "DuoAttentionPress": Timed(
        lambda p, n: p.DuoAttentionPress(0.5, head_scores=HEAD_SCORES),
        lambda p, n: handed.head_scores(p.DuoAttentionPress(0.5), HEAD_SCORES, 128, 256),
        headwise=True,
    ),
    "FastKVzipPress": Timed(
        lambda p, n: p.FastKVzipPress(0.5, gates=GATES),
        lambda p, n: handed.gates(p.FastKVzipPress(0.5), GATES),
        headwise=True,
    ),
    "LUKVPress": Timed(
        lambda p, n: p.LUKVPress(compression_ratio=0.5, curves=CURVES),
        lambda p, n: handed.curves(p.LUKVPress(compression_ratio=0.5), CURVES),
        headwise=True,
    ),
    "FinchPress": Timed(
        lambda p, n: p.FinchPress(0.5, delimiter_token_id=handed.DELIMITER),
        lambda p, n: handed.delimiter(p.FinchPress(0.5)),
        delimiter_before=64,
    ),
    "KVzipPress": Timed(
        lambda p, n: p.KVzipPress(0.5, prompts=handed.PROMPTS), lambda p, n: p.KVzipPress(0.5)
    ),
}
"""By name: what is timed, from a package and the length of the context."""

NOT_TIMED = {
    "KVComposePress": "has the model read the whole context again, and the stand-in reads nothing",
    "KVgradPress": "asks for gradients, and the stand-in computes nothing",
    "RestoreKVPress": "adapts the linear layers of the model, and the stand-in has none at work",
}
"""Presses whose time is that of a model."""


# ---- the comparison ------------------------------------------------------------------------------


@dataclass
class Row:
    """What one press takes per layer, for a context of so many `tokens`, `decoded` ones after it.

    Attributes:
        low, high: the interval of the ratio.
        floor_ms: what half of the scores, and the keys and values there, take to be picked.
        ours_mib, kvpress_mib: allocated at most; with the attention weights, where kvpress cannot
            do without. What is measured here then runs under sdpa, which returns none.
    """

    press: str
    tokens: int
    decoded: int
    rounds: int
    ours_ms: float
    kvpress_ms: float
    ratio: float
    low: float
    high: float
    floor_ms: float
    ours_to_floor: float
    ours_mib: float
    kvpress_mib: float

    def __str__(self) -> str:
        what = f"{self.press:28} {self.tokens:6} {self.decoded:3}"
        times = f"{self.ours_ms:9.2f} {self.kvpress_ms:9.2f} {self.ratio:6.2f}"
        memory = f"{self.ours_mib:9.1f} {self.kvpress_mib:9.1f}"
        return f"{what} {times} {self.ours_to_floor:7.1f} {memory}"


class Comparison:
    """One press, here and in kvpress."""

    def __init__(self, name: str, length: int, stand_ins: dict[bool, StandIn]) -> None:
        self.name, self.length, self.stand_ins = name, length, stand_ins
        self.timed = TIMED[name]
        self.ids = stand_ins[False].ids[:, :length]
        if self.timed.delimiter_before:
            self.ids = stand_ins[False].ids.clone()
            self.ids[0, -self.timed.delimiter_before - 1] = handed.DELIMITER

    def press(self, whose: str) -> Any:
        if whose == "ours":
            return self.timed.build(hooks_impl, self.length)
        return (self.timed.theirs or self.timed.build)(kvpress, self.length)

    def seconds(self, whose: str, decoded: int) -> float:
        clock, stand_in = Clock(), self.stand_ins[self.timed.eager]
        then = decoded or self.timed.then
        gc.disable()
        stand_in.measure(clock, self.press(whose), self.ids, then, attending=decoded > 0)
        gc.enable()
        return clock.spent / N_LAYERS

    def mib(self, whose: str, decoded: int) -> float:
        memory, stand_in = Memory(), self.stand_ins[self.timed.eager and whose == "kvpress"]
        then = decoded or self.timed.then
        stand_in.measure(memory, self.press(whose), self.ids, then, attending=decoded > 0)
        weights = 0 if stand_in.weights is None else stand_in.weights.nbytes
        return (memory.peak + weights) / 2**20

    def floor_seconds(self) -> float:
        """The best half of a layer's tokens, picked once."""
        scores, states = torch.randn(1, N_KV, self.length), torch.randn(1, N_KV, self.length, D)
        began = perf_counter()
        best = scores.topk(self.length // 2, sorted=False).indices
        rows = (best + torch.arange(N_KV).view(N_KV, 1) * self.length).flatten()
        for _ in ("keys", "values"):
            states.view(-1, D).index_select(0, rows)
        return perf_counter() - began

    def row(self, decoded: int = 0) -> Row:
        memory = {whose: self.mib(whose, decoded) for whose in ("ours", "kvpress")}
        times: dict[str, list[float]] = {"ours": [], "kvpress": []}
        floor = []
        began = perf_counter()
        for number in range(-1, ROUNDS):
            if number >= LEAST and perf_counter() - began > SECONDS:
                break
            for whose in sorted(times, reverse=number % 2 == 0):
                seconds = self.seconds(whose, decoded)
                if number >= 0:  # the first warms up
                    times[whose].append(seconds)
            floor.append(self.floor_seconds())
        ratios = [a / b for a, b in zip(*times.values(), strict=True)]
        ours, theirs, least = (
            1000 * statistics.median(taken) for taken in (*times.values(), floor)
        )
        what = self.name, self.length, decoded, len(ratios)
        ratio = statistics.median(ratios)
        ends = median_interval(ratios)
        return Row(*what, ours, theirs, ratio, *ends, least, ours / least, *memory.values())


def compare_all(names: list[str]) -> list[Row]:
    """Rows of all presses of `names`; prints them as they come."""
    rows: list[Row] = []
    context = get_context("forkserver")
    context.set_forkserver_preload(["kvpress", "hooks_impl"])
    with context.Pool(1, maxtasksperchild=1) as processes:
        for found in processes.imap(_compare, names):
            rows += found
            print(*found, sep="\n", file=sys.stderr, flush=True)
    return rows


def _compare(name: str) -> list[Row]:
    """The rows of a press."""
    stand_ins = {eager: StandIn(LENGTH, eager) for eager in {False, TIMED[name].eager}}
    tokenizer = patch.object(
        handed.AutoTokenizer, "from_pretrained", lambda *_, **__: handed.PromptTokenizer()
    )
    with tokenizer:
        comparison = Comparison(name, LENGTH, stand_ins)
        return [
            comparison.row(decoded) for decoded in ((0, DECODED) if TIMED[name].headwise else (0,))
        ]


def summary(rows: list[Row]) -> str:
    prefills = [row for row in rows if not row.decoded]
    complete = [row for row in rows if row.decoded or not TIMED[row.press].headwise]
    return "\n".join(
        f"{what}: geometric mean {geometric_mean(chosen):.2f}; {worst(chosen)}"
        for what, chosen in (
            ("Prefills alone", prefills),
            (f"Head-wise presses with {DECODED} tokens decoded", complete),
        )
    )


def geometric_mean(rows: list[Row]) -> float:
    return math.exp(statistics.fmean(math.log(row.ratio) for row in rows))


def worst(rows: list[Row]) -> str:
    slow = sorted((row for row in rows if row.ratio > 0.8), key=lambda row: -row.ratio)
    named = ", ".join(f"{row.press} {row.ratio:.2f} ({row.tokens} tokens)" for row in slow)
    return f"above 0.80: {named or 'none'}"


def write(rows: list[Row]) -> None:
    """As CSV to standard output."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(vars(rows[0]))
    for row in rows:
        values = vars(row).values()
        writer.writerow(f"{x:.4g}" if isinstance(x, float) else x for x in values)


def main(names: list[str]) -> None:
    known = TIMED.keys() | NOT_TIMED.keys() | NOT_IN_KVPRESS.keys()
    assert known == hooks_impl.PRESSES.keys()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores\n"
        f"{'press':28} {'tokens':>6} {'+':>3} {'ours, ms':>9} {'kvpress':>9} {'ratio':>6} "
        f"{'floors':>7} {'ours, MiB':>9} {'kvpress':>9}",
        file=sys.stderr,
    )
    rows = compare_all(names or list(TIMED))
    print(summary(rows), file=sys.stderr)
    write(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
