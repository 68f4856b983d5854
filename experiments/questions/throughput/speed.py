"""Times of answers, taken in turn, and ratios of them, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from experiments.framework.intervals import median_interval
from experiments.framework.timing import Array, each_in_turn
from experiments.questions.throughput.cells import (
    BARE,
    FULL,
    Condition,
    Opens,
    answer,
    context_of,
    predicted_bytes,
)


@dataclass(frozen=True)
class Effort:
    """How much is run.

    Attributes:
        tokens: decoded in each answer.
        rounds: in which every condition takes its turn.
        compiled_rounds: the last of them, in which the compiled model decodes too.
    """

    tokens: int = 16
    rounds: int = 5
    compiled_rounds: int = 0


def speeds(
    model: PreTrainedModel,
    opened: Mapping[Condition, Opens],
    context: int,
    batch: int,
    effort: Effort,
    advance: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """A row per condition; see `Throughput.measure`.

    Args:
        opened: what each condition opens; `FULL` among them.
        advance: called after each round.
    """
    ids, turn, held = context_of(model, batch, context), 0, {}
    compiled = torch.compile(model, dynamic=True) if effort.compiled_rounds else None
    first_compiled = effort.rounds - effort.compiled_rounds  # the round before warms it up

    def timed(condition: Condition) -> tuple[float, float, float]:
        nonlocal turn
        index, turn = turn // len(opened), turn + 1
        asked = compiled if index >= first_compiled else None
        took = answer(model, ids, opened[condition], effort.tokens, asked)
        held[condition] = took.n_bytes
        in_order = index > first_compiled and took.compiled is not None
        return took.first, took.step, took.compiled if in_order else np.nan  # type: ignore[return-value]

    # A patch puts a forward of its own on each module, each of which is compiled by itself.
    with torch._dynamo.config.patch(recompile_limit=256):
        times = each_in_turn(list(opened), timed, rounds=effort.rounds, advance=advance)
    for condition, taken in times.items():
        predicted = predicted_bytes(model, condition, batch * context)
        yield (
            {"context": context, "batch": batch, **condition._asdict(), "rounds": effort.rounds}
            | _ratios(times, condition, batch)
            | {"first_ms": 1e3 * float(np.median(taken[:, 0]))}
            | {"tokens_per_s": batch / float(np.median(taken[:, 1]))}
            | {"bytes": held[condition], "predicted": predicted}
        )


def _ratios(times: Mapping[Condition, Array], condition: Condition, batch: int) -> dict[str, Any]:
    """Times over those without a press, tokens per second over them; patches over hooks."""
    first, step, compiled = times[condition].T
    bare_first, bare_step, _ = times[FULL].T
    row = _interval("first", first / bare_first) | _interval("speed", bare_step / step)
    settled = ~np.isnan(compiled)
    if settled.any():
        row["compiled_tokens_per_s"] = batch / float(np.median(compiled[settled]))
        row |= _interval("compiled", step[settled] / compiled[settled])
    hook = condition._replace(mechanism="hook")
    if condition.mechanism not in (BARE, "hook") and hook in times:
        row |= _interval("first_over_hook", first / times[hook][:, 0])
        row |= _interval("speed_over_hook", times[hook][:, 1] / step)
    return row


def _interval(name: str, ratios: Array) -> dict[str, float]:
    low, high = median_interval(ratios)
    return {name: float(np.median(ratios)), f"{name}_low": low, f"{name}_high": high}
