"""What a decode step takes and what a cache holds, of everything, of what is kept, in four ways.

Times depend on how many tokens are kept, not on which: the context is one of random tokens, of
which all heads keep those of Knorm, or share that budget by AdaKV. All of them take turns, and are
compared round by round with the full cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from transformers import Cache, PreTrainedModel

from experiments.framework.shared import median_of
from experiments.framework.timing import Stopwatch, each_in_turn
from experiments.testbed.compare import Inputs
from experiments.testbed.variants import VARIANTS, kept_in
from hooks_impl import AdaKVPress, KnormPress
from press_core import RaggedLayer, cache_nbytes

FULL, UNIFORM = "full", "uniform"
"""The cache without a press, and one from which all heads have evicted as many tokens."""


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        contexts: tokens in the cache.
        ratios: shares of them evicted.
        rounds: in which all take their turn.
        repeats: steps of each in a round, of which the quickest counts.
    """

    contexts: tuple[int, ...] = (1024, 4096)
    ratios: tuple[float, ...] = (0.5, 0.8)
    rounds: int = 25
    repeats: int = 2


class Timed(NamedTuple):
    """What is timed: a way to hold a context, and the share of it that is evicted."""

    condition: str
    ratio: float = 0.0


Held = tuple[Cache, Callable[[], AbstractContextManager[Any]]]
"""A cache, and what opens the scope that decodes it."""


@torch.inference_mode()
def caches(model: PreTrainedModel, context: int, ratios: tuple[float, ...]) -> dict[Timed, Held]:
    """Everything that is timed at one context length, of one context of random tokens."""
    vocabulary = model.get_input_embeddings().num_embeddings
    (ids, *_) = Inputs.random(vocabulary, [context], question=0, steps=0).forwards(model.device)

    def prefilled(scope: AbstractContextManager[Any]) -> Cache:
        with scope:
            return model(**ids, use_cache=True, logits_to_keep=1).past_key_values

    full = prefilled(nullcontext())
    held: dict[Timed, Held] = {Timed(FULL): (full, nullcontext)}
    for ratio in ratios:
        evenly = KnormPress(ratio)
        held[Timed(UNIFORM, ratio)] = (prefilled(evenly(model)), nullcontext)
        kept = kept_in(prefilled(AdaKVPress(evenly)(model)))
        for variant in VARIANTS.values():
            opened = partial(variant.open, model, kept)
            held[Timed(variant.name, ratio)] = (variant.cache(full, kept), opened)
    return held


# ---- times ---------------------------------------------------------------------------------------


@torch.inference_mode()
def step_seconds(model: PreTrainedModel, cache: Cache, context: int) -> float:
    """What it takes to decode one token, which is taken away again: `context` tokens stay.

    The first three variants share the tensors of the full cache, which are put back, as a step
    leaves longer copies; ragged layers write into the room that they have.
    """
    before = [(layer.keys, layer.values) for layer in cache.layers]
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    watch = Stopwatch(model.device)
    model(input_ids=token, past_key_values=cache)
    watch.lap()
    for layer, states in zip(cache.layers, before, strict=True):
        if isinstance(layer, RaggedLayer):
            layer.crop(context - layer.get_seq_length())
        else:
            layer.keys, layer.values = states
    return watch.seconds()[0]


@torch.inference_mode()
def decode_times(
    model: PreTrainedModel, context: int, size: Size, advance: Callable[[], None] = lambda: None
) -> pd.DataFrame:
    """Times and bytes at one context length.

    Returns:
        Columns `context`, `condition`, `ratio` (evicted); `time` the median of the ratio to the
        full cache over rounds, `low` and `high` its interval; `ms` and `full_ms` the median
        milliseconds, for context; `bytes` and `full_bytes` that the caches hold; `rounds`.
    """
    held = caches(model, context, size.ratios)

    def quickest(name: Timed) -> float:
        cache, opened = held[name]
        with opened():
            return min(step_seconds(model, cache, context) for _ in range(size.repeats))

    times = each_in_turn(list(held), quickest, rounds=size.rounds, advance=advance)
    n_bytes, full = {name: cache_nbytes(cache) for name, (cache, _) in held.items()}, Timed(FULL)
    rows = (
        {"context": context, **name._asdict()}
        | median_of("time", seconds / times[full])
        | {"ms": 1e3 * float(np.median(seconds)), "full_ms": 1e3 * float(np.median(times[full]))}
        | {"bytes": n_bytes[name], "full_bytes": n_bytes[full], "rounds": len(seconds)}
        for name, seconds in times.items()
    )
    return pd.DataFrame(rows)
