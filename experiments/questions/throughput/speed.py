"""Times of answers, taken in turn, and ratios of them, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from experiments.framework.intervals import median_interval
from experiments.framework.timing import Array, each_in_turn
from experiments.questions.throughput.cells import (
    BARE,
    FULL,
    Condition,
    Opens,
    answer,
    compiled_steps,
    context_of,
    predicted_bytes,
)


@dataclass(frozen=True)
class Effort:
    """How much is run.

    Attributes:
        tokens: decoded in each answer.
        rounds: in which every condition takes its turn.
        compiled_rounds: in which the compiled model takes turns with the eager one; 0: none.
    """

    tokens: int = 16
    rounds: int = 6
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
        advance: called after each round, and after each condition that was compiled.
    """
    ids, held = context_of(model, batch, context), {}

    def timed(condition: Condition) -> tuple[float, float]:
        took = answer(model, ids, opened[condition], effort.tokens)
        held[condition] = took.n_bytes
        return took.first, took.step

    times = each_in_turn(list(opened), timed, rounds=effort.rounds, advance=advance)
    for condition, taken in times.items():
        row = {"context": context, "batch": batch, **condition._asdict(), "rounds": effort.rounds}
        row |= _ratios(times, condition)
        row |= {"first_ms": 1e3 * float(np.median(taken[:, 0]))}
        row |= {"tokens_per_s": batch / float(np.median(taken[:, 1]))}
        if effort.compiled_rounds:
            row |= _compiled(model, ids, opened[condition], effort)
            advance()
        predicted = predicted_bytes(model, condition, batch * context)
        yield row | {"bytes": held[condition], "predicted": predicted}


def _ratios(times: Mapping[Condition, Array], condition: Condition) -> dict[str, Any]:
    """Times over those without a press, tokens per second over them; patches over hooks."""
    first, step = times[condition].T
    bare_first, bare_step = times[FULL].T
    row = _interval("first", first / bare_first) | _interval("speed", bare_step / step)
    hook = condition._replace(mechanism="hook")
    if condition.mechanism not in (BARE, "hook") and hook in times:
        row |= _interval("first_over_hook", first / times[hook][:, 0])
        row |= _interval("speed_over_hook", times[hook][:, 1] / step)
    return row


def _compiled(model: PreTrainedModel, ids: Tensor, opens: Opens, effort: Effort) -> dict[str, Any]:
    """Tokens per second of the compiled model, over those of the eager one."""
    taken = compiled_steps(model, ids, opens, effort.tokens, effort.compiled_rounds)
    eager, graphs = np.array(taken).T
    rate = {"compiled_tokens_per_s": len(ids) / float(np.median(graphs))}
    return rate | _interval("compiled", eager / graphs)


def _interval(name: str, ratios: Array) -> dict[str, float]:
    low, high = median_interval(ratios)
    return {name: float(np.median(ratios)), f"{name}_low": low, f"{name}_high": high}
