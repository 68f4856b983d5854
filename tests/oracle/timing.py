"""Time spent inside the presses, against kvpress: `python -m tests.oracle.timing`.

What is timed is what a press adds to a model: all hooks that its scope registers, whatever they are
for, and the end of the scope (where KVzip of kvpress does its work). What the model computes
meanwhile is taken out. As it costs the same with every press, the model does not compute at all: a
stand-in with the modules of a Llama (2 layers, 16 query and 4 KV heads of 64, float32) hands on
hidden states, queries, keys and values that were made before. Presses that call projections get
them computed.

Both sides run in turn, round by round; reported are the median times per layer and the median of
the ratios of the rounds.
"""

from __future__ import annotations

import csv
import gc
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import kvpress
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import hooks_impl
from press_core.methods.duo_attention import HeadScores
from press_core.methods.expected_attention_stats import ExpectedAttentionStats
from press_core.methods.kvzap import KVzapRegressor
from press_core.methods.qfilter import QFilters
from tests.oracle import handed
from tests.oracle.cases import Build
from tests.oracle.differences import NOT_IN_KVPRESS

LENGTHS = (2048, 8192)
N_LAYERS, N_HEADS, N_KV, D, VOCABULARY = 2, 16, 4, 64, 4096
WIDTH = N_HEADS * D
ROUNDS, SECONDS = 9, 20.0
"""Rounds per press and length, and after how much time a press gets no more (but three)."""

RESULTS = Path(__file__).parents[2] / "results" / "oracle-timing.csv"


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


FILTERS = QFilters(random(N_LAYERS, N_KV, D))
STATS = ExpectedAttentionStats(random(N_LAYERS, N_HEADS, D), torch.eye(D).expand(2, 16, D, D))
HEAD_SCORES = HeadScores(random(N_LAYERS, N_KV))
REGRESSOR = KVzapRegressor(
    random(N_LAYERS, N_KV, WIDTH // 8),
    random(N_LAYERS, N_KV),
    random(N_LAYERS, WIDTH // 8, WIDTH),
    random(N_LAYERS, WIDTH // 8),
)


@dataclass(frozen=True)
class Timed:
    """A press to be timed.

    Attributes:
        build: makes it from a package.
        theirs: makes kvpress's where that takes something else.
        prompt: tokens that come after the context, one by one or as they are.
    """

    build: Build
    theirs: Build | None = None
    then: int = 0
    delimiter_before: int = 0
    eager: bool = False


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
    "BlockPress": Timed(lambda p, n: p.BlockPress(p.KeyDiffPress(0.5))),
    "PerLayerCompressionPress": Timed(lambda p, n: p.PerLayerCompressionPress(snap(p), [0.3, 0.7])),
    "AdaKVPress": Timed(lambda p, n: p.AdaKVPress(snap(p))),
    "CriticalAdaKVPress": Timed(lambda p, n: p.CriticalAdaKVPress(snap(p))),
    "DMSPress": Timed(lambda p, n: p.DMSPress(p.KnormPress(), threshold=-8.0)),
    "DecodingPress": Timed(
        lambda p, n: p.DecodingPress(p.KnormPress(), compression_interval=4, target_size=n // 2),
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


# ---- the clock -----------------------------------------------------------------------------------


@dataclass
class Clock:
    """Counts the time in which the press is at work and the model is not."""

    spent: float = 0.0
    _counting: list[bool] = field(default_factory=list)
    _since: float = 0.0

    def _switch(self) -> None:
        now = perf_counter()
        if self._counting and self._counting[-1]:
            self.spent += now - self._since
        self._since = now

    @contextmanager
    def at(self, press: bool) -> Iterator[None]:
        """The time of the press, or of the model, until something else begins inside."""
        self._switch()
        self._counting.append(press)
        try:
            yield
        finally:
            self._switch()
            self._counting.pop()

    def timed(self, function: Callable[..., Any], press: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.at(press):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def timing_hooks(self) -> Iterator[None]:
        """All hooks registered meanwhile are the press's."""

        def timing(register: Callable[..., Any]) -> Callable[..., Any]:
            def timed_register(module: nn.Module, hook: Any, **kwargs: Any) -> Any:
                return register(module, self.timed(hook, True), **kwargs)

            return timed_register

        names = "register_forward_hook", "register_forward_pre_hook"
        patches = [
            patch.object(nn.Module, name, timing(getattr(nn.Module, name))) for name in names
        ]
        with patches[0], patches[1]:
            yield


# ---- the stand-in --------------------------------------------------------------------------------


class StandIn:
    """A Llama whose modules hand on what was made before.

    Attributes:
        model: to open presses on.
        clock: knows when the model is at work.
    """

    def __init__(self, length: int, eager: bool) -> None:
        total = length + 3072  # what KVzip replays comes after the context
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=1,
            num_hidden_layers=N_LAYERS,
            num_attention_heads=N_HEADS,
            num_key_value_heads=N_KV,
            head_dim=D,
            max_position_embeddings=total,
            attn_implementation="eager" if eager else "sdpa",
        )
        torch.manual_seed(0)
        self.clock, self.model = Clock(), LlamaForCausalLM(config).eval()
        self.ids = torch.randint(10, VOCABULARY, (1, length + 1))
        self.hidden = torch.randn(1, total, WIDTH)
        self.positions = torch.arange(total)[None]
        with torch.no_grad():
            self.rotation = self.model.model.rotary_emb(self.hidden, self.positions)
            weights = None
            for layer in self.model.model.layers:
                attention = layer.self_attn
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                    nn.init.normal_(projection.weight, std=WIDTH**-0.5)
                if eager and weights is None:
                    weights = self._weights(attention, length)
                self._replace(attention, weights)
        body = self.model.model
        body.forward = self.clock.timed(self._body, False)

    def _states(self, projection: nn.Module) -> Tensor:
        return projection(self.hidden).unflatten(-1, (-1, D)).transpose(1, 2)

    def _weights(self, attention: Any, length: int) -> Tensor:
        """Causal attention weights `(1, H, S, S)`, head by head to save memory."""
        query, key = (self._states(p)[:, :, :length] for p in (attention.q_proj, attention.k_proj))
        weights = torch.empty(1, N_HEADS, length, length)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        for head in range(N_HEADS):
            logits = query[0, head] @ key[0, head * N_KV // N_HEADS].T / D**0.5
            weights[0, head] = logits.masked_fill_(future, -torch.inf).softmax(dim=-1)
        return weights

    def _replace(self, attention: Any, weights: Tensor | None) -> None:
        project = attention.q_proj.forward
        query = attention.q_proj(self.hidden)
        key, value = (self._states(p) for p in (attention.k_proj, attention.v_proj))
        _, key = apply_rotary_pos_emb(key, key, *self.rotation)
        asked: list[slice] = []  # by the stand-in itself

        def q_proj(hidden_states: Tensor) -> Tensor:
            return query[:, asked[-1]] if asked else project(hidden_states)

        def forward(
            hidden_states: Tensor, past_key_values: Any, position_ids: Tensor, **_: Any
        ) -> Any:
            start = int(position_ids[0, 0])
            now = slice(start, start + hidden_states.shape[1])
            asked.append(now)
            attention.q_proj(hidden_states)
            asked.pop()
            past_key_values.update(key[:, :, now], value[:, :, now], attention.layer_idx)
            return hidden_states, weights

        attention.q_proj.forward = q_proj
        attention.forward = self.clock.timed(forward, False)

    def _body(self, input_ids: Tensor, past_key_values: Any, **_: Any) -> BaseModelOutputWithPast:
        body = self.model.model
        n, start = body.embed_tokens(input_ids).shape[1], past_key_values.get_seq_length()
        now = slice(start, start + n)
        for layer in body.layers:
            layer.self_attn(
                hidden_states=self.hidden[:, now],
                position_embeddings=tuple(x[:, now] for x in self.rotation),
                attention_mask=None,
                position_ids=self.positions[:, now],
                past_key_values=past_key_values,
                use_cache=True,
                cache_position=self.positions[0, now],
            )
        return BaseModelOutputWithPast(self.hidden[:, now], past_key_values)

    def seconds(self, press: Any, timed: Timed, length: int) -> float:
        """Time that `press` takes per layer, for a context of `length` tokens."""
        ids, past = self.ids[:, :length], DynamicCache()
        if timed.delimiter_before:
            ids = self.ids.clone()
            ids[0, -timed.delimiter_before - 1] = handed.DELIMITER
        self.clock.spent = 0.0
        gc.collect()
        gc.disable()
        scope = press(self.model)
        with torch.no_grad():
            with self.clock.timing_hooks():
                scope.__enter__()
            self.model(ids, past_key_values=past, logits_to_keep=1)
            for _ in range(timed.then):
                self.model(self.ids[:, :1], past_key_values=past, logits_to_keep=1)
            with self.clock.at(press=True):
                scope.__exit__(None, None, None)
        gc.enable()
        return self.clock.spent / N_LAYERS


# ---- the comparison ------------------------------------------------------------------------------


@dataclass
class Row:
    """Medians over rounds, of one press and length."""

    press: str
    tokens: int
    rounds: int
    ours_ms: float
    kvpress_ms: float
    ratio: float


def measure(name: str, length: int, stand_ins: dict[bool, StandIn]) -> Row:
    timed = TIMED[name]
    stand_in = stand_ins[timed.eager]
    build = {"ours": timed.build, "kvpress": timed.theirs or timed.build}
    package = {"ours": hooks_impl, "kvpress": kvpress}

    def once(whose: str) -> float:
        return stand_in.seconds(build[whose](package[whose], length), timed, length)

    times: dict[str, list[float]] = {"ours": [], "kvpress": []}
    began = perf_counter()
    for number in range(-1, ROUNDS):
        if number >= 3 and perf_counter() - began > SECONDS:
            break
        for whose in sorted(times, reverse=number % 2 == 0):
            seconds = once(whose)
            if number >= 0:  # the first warms up
                times[whose].append(seconds)
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    medians = (1000 * statistics.median(times[whose]) for whose in times)
    return Row(name, length, len(ratios), *medians, statistics.median(ratios))


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def main(names: list[str]) -> None:
    assert TIMED.keys() | NOT_IN_KVPRESS.keys() == hooks_impl.PRESSES.keys()
    rows = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores")
    print(f"{'press':28} {'tokens':>6} {'ours, ms':>9} {'kvpress':>9} {'ratio':>6}")
    with patch.object(
        handed.AutoTokenizer, "from_pretrained", lambda *_, **__: handed.PromptTokenizer()
    ):
        for length in LENGTHS:
            stand_ins: dict[bool, StandIn] = {False: StandIn(length, False)}
            for name in names or TIMED:
                if TIMED[name].eager and True not in stand_ins:
                    stand_ins[True] = StandIn(length, True)
                row = measure(name, length, stand_ins)
                if TIMED[name].eager:
                    del stand_ins[True]
                rows.append(row)
                times = f"{row.ours_ms:9.2f} {row.kvpress_ms:9.2f}"
                print(f"{name:28} {length:6} {times} {row.ratio:6.2f}", flush=True)
    worst = max(rows, key=lambda row: row.ratio)
    mean = geometric_mean([row.ratio for row in rows])
    print(f"geometric mean {mean:.2f}, worst {worst.ratio:.2f} ({worst.press}, {worst.tokens})")
    if not names:
        with RESULTS.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(vars(rows[0]))
            for row in rows:
                values = vars(row).values()
                writer.writerow(f"{x:.4g}" if isinstance(x, float) else x for x in values)


if __name__ == "__main__":
    main(sys.argv[1:])
