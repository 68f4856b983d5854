"""Times of answers, from an empty cache to the last token, and ratios of them, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from experiments.framework.intervals import median_interval
from experiments.framework.timing import Array, Stopwatch, each_in_turn
from experiments.testbed.timed_models import FULL, Condition, Opens, random_context
from press_core import cache_nbytes


class Answer(NamedTuple):
    """What one answer took.

    Attributes:
        first: seconds from the context to the first token.
        step: seconds of each further token.
        n_bytes: of the cache after the first token.
    """

    first: float
    step: float
    n_bytes: int


@torch.inference_mode()
def answer(model: PreTrainedModel, ids: Tensor, opens: Opens, tokens: int) -> Answer:
    """Read a context and decode greedily, the scope open all the while.

    Args:
        ids: `(B, S)`.
        tokens: to decode after the first.
    """
    with opens():
        cache = DynamicCache(config=model.config)
        watch = Stopwatch(model.device)
        token = _next(model, ids, cache, logits_to_keep=1)
        watch.lap()
        n_bytes = cache_nbytes(cache)
        decoding = Stopwatch(model.device)
        for _ in range(tokens):
            token = _next(model, token, cache)
        decoding.lap()
        (first,), (rest,) = watch.seconds(), decoding.seconds()
    return Answer(first, rest / tokens, n_bytes)


def _next(model: Any, ids: Tensor, cache: DynamicCache, **more: Any) -> Tensor:
    """`(B, 1)`, the likeliest next token."""
    logits = model(input_ids=ids, past_key_values=cache, **more).logits
    return logits[:, -1:].argmax(dim=-1)


def speeds(
    model: PreTrainedModel,
    opened: Mapping[Condition, Opens],
    context: int,
    batch: int,
    tokens: int,
    rounds: int,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """A row per condition; see `Throughput.measure`.

    Args:
        opened: what each condition opens; `FULL` among them.
        tokens: decoded in each answer, after the first.
        rounds: in which all take their turn.
        advance: called after each round.
    """
    ids, held = random_context(model, batch, context), {}

    def timed(condition: Condition) -> tuple[float, float]:
        took = answer(model, ids, opened[condition], tokens)
        held[condition] = took.n_bytes
        return took.first, took.step

    times = each_in_turn(list(opened), timed, rounds=rounds, advance=advance)
    for condition, taken in times.items():
        first, step = taken.T
        row = {"context": context, "batch": batch, **condition._asdict(), "rounds": rounds}
        row |= _interval("first", first / times[FULL][:, 0])
        row |= _interval("speed", times[FULL][:, 1] / step)
        hook = times.get(condition._replace(mechanism="hook"))
        if hook is not None and condition.mechanism != "hook":
            row |= _interval("speed_over_hook", hook[:, 1] / step)
        row |= {"first_ms": 1e3 * float(np.median(first))}
        row |= {"tokens_per_s": batch / float(np.median(step))}
        yield row | {"bytes": held[condition]}


def _interval(name: str, ratios: Array) -> dict[str, float]:
    low, high = median_interval(ratios)
    return {name: float(np.median(ratios)), f"{name}_low": low, f"{name}_high": high}
