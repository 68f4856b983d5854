"""A decode step over heads of different lengths, in models of several shapes.

Steps are timed on three caches, in turn: everything, what is left where all heads evict as many
tokens, and what is left where they share a budget. The model reads the first two by itself. It is
narrow, so that a step is mostly attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from attention_patch import headwise
from experiments.framework.intervals import median_interval
from experiments.framework.timing import in_turn
from experiments.testbed.decoding import (
    FULL,
    UNIFORM,
    Decoder,
    Held,
    full_cache,
    head_budgets,
    uniform_cache,
)
from experiments.testbed.families import build
from experiments.testbed.variants import evicted

RAGGED, RATIO = "ragged", 0.8

LAYERS = 4
"""Enough that the processor does not hold the whole cache in its own."""

SHAPES = [(batch, heads) for batch in (1, 8) for heads in ((4, 2, 64), (8, 4, 128))]
"""Rows of a batch; KV heads, queries of each, channels."""

MOST_BYTES = 2**28
"""Of the full cache; what needs more is left out."""


def shape_times(
    contexts: Sequence[int], rounds: int, advance: Callable[[], object] = lambda: None
) -> pd.DataFrame:
    """Times of all shapes, one row per shape and cache that the ragged one is compared with.

    Args:
        contexts: tokens in the cache.
        advance: called after each shape.

    Returns:
        Columns `batch`, `heads` (KV heads x queries of each x channels), `kv_heads`, `context`,
        `ratio` (evicted), `against` (what it is compared with); `time`, the median over rounds of
        the ratio to it, with `low` and `high`, its interval; `rounds`.
    """
    rows: list[dict[str, Any]] = []
    for context in contexts:
        for batch, heads in SHAPES:
            if 8 * LAYERS * batch * heads[0] * heads[2] * context <= MOST_BYTES:
                rows += _rows(batch, heads, context, rounds)
            advance()
    return pd.DataFrame(rows)


@torch.inference_mode()
def _rows(
    batch: int, heads: tuple[int, int, int], context: int, rounds: int
) -> Iterator[dict[str, Any]]:
    kv_heads, group, head_dim = heads
    sizes: dict[str, Any] = {
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    model = build("llama", num_layers=LAYERS, width=256, **sizes)
    full = full_cache(model, context, batch)
    caches = {
        FULL: Held(full, nullcontext),
        UNIFORM: Held(uniform_cache(full, RATIO), nullcontext),
        RAGGED: Held(evicted(full, head_budgets(full, RATIO)), partial(headwise, model)),
    }
    decoder = Decoder(model, context, batch)
    scopes = {name: partial(decoder.turn, held) for name, held in caches.items()}
    run = partial(in_turn, scopes, decoder.step, prepare=decoder.restore)
    seconds = run(rounds=rounds, repeats=3)
    for against in (UNIFORM, FULL):
        ratios = seconds[RAGGED] / seconds[against]
        low, high = median_interval(ratios)
        yield (
            {"batch": batch, "heads": "x".join(map(str, heads)), "kv_heads": kv_heads}
            | {"context": context, "ratio": RATIO, "against": against}
            | {"time": float(np.median(ratios)), "low": low, "high": high, "rounds": rounds}
        )
