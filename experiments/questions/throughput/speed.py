"""Times of answers, from an empty cache to the last token, and ratios of them, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from experiments.framework.shared import median_of
from experiments.framework.timing import Array, Stopwatch, each_in_turn
from experiments.testbed.timed_models import (
    FULL,
    Condition,
    ModelSpec,
    Opens,
    random_context,
    scope_of,
)
from press_core import cache_nbytes


@torch.inference_mode()
def answer(
    model: PreTrainedModel, ids: Tensor, opens: Opens, tokens: int
) -> tuple[float, float, int]:
    """Read a context and decode greedily, the scope open all the while.

    Args:
        ids: `(B, S)`.
        tokens: to decode after the first.

    Returns:
        Seconds from the context to the first token, seconds of each further token, and bytes of the
        cache after the first token.
    """
    with opens():
        cache = DynamicCache(config=model.config)
        watch = Stopwatch(model.device)
        token = _next(model, ids, cache, logits_to_keep=1)
        watch.lap()
        n_bytes = cache_nbytes(cache)
        watch.lap()
        for _ in range(tokens):
            token = _next(model, token, cache)
        watch.lap()
        first, _, rest = watch.seconds()
    return first, rest / tokens, n_bytes


def _next(model: Any, ids: Tensor, cache: DynamicCache, **more: Any) -> Tensor:
    """`(B, 1)`, the likeliest next token."""
    logits = model(input_ids=ids, past_key_values=cache, **more).logits
    return logits[:, -1:].argmax(dim=-1)


def speeds(
    spec: ModelSpec,
    asked: Sequence[Condition],
    contexts: Sequence[int],
    batches: Sequence[int],
    tokens: int,
    rounds: int,
    of_kvpress: Mapping[str, type[Any]] | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """A row per context, batch and condition; see `Throughput.measure`.

    Args:
        asked: the conditions, `FULL` among them.
        tokens: decoded in each answer, after the first.
        rounds: in which all take their turn.
        of_kvpress: its presses, where it is imported.
        advance: called after each round.

    Raises:
        PressError: if the model does not suit a press; before anything is measured.
    """
    model = spec.load()
    opened = {n: {one: scope_of(one, model, n, of_kvpress) for one in asked} for n in contexts}
    for context, scopes in opened.items():
        for batch in batches:
            ids = random_context(model, batch, context)

            def timed(one: Condition, ids: Tensor = ids, scopes: Any = scopes) -> Any:
                return answer(model, ids, scopes[one], tokens)

            times = each_in_turn(list(scopes), timed, rounds=rounds, advance=advance)
            for row in _rows(times, batch):
                yield {"model": spec.name, "context": context, "batch": batch} | row


def _rows(times: Mapping[Condition, Array], batch: int) -> Iterator[dict[str, Any]]:
    for condition, taken in times.items():
        first, step, held = taken.T
        row = {**condition._asdict(), "rounds": len(taken)}
        row |= median_of("first", first / times[FULL][:, 0], of="first_")
        row |= median_of("speed", times[FULL][:, 1] / step, of="speed_")
        hook = times.get(condition._replace(mechanism="hook"))
        if hook is not None and condition.mechanism != "hook":
            row |= median_of("speed_over_hook", hook[:, 1] / step, of="speed_over_hook_")
        row |= {"first_ms": 1e3 * float(np.median(first))}
        row |= {"tokens_per_s": batch / float(np.median(step))}
        yield row | {"bytes": int(held[-1])}
