"""Uniform against head-wise budgets: the same scores, allocated in two ways.

Both presses of a pair have the same scores. The *uniform* press keeps the same number of tokens in
every head. The *head-wise* press keeps the same total, and lets the heads of a layer (KVzip: of the
model) compete for it. Both compress the same contexts of the facts task before any question is
known, and answer the same questions, so they are compared context by context. DuoAttention is
paired with StreamingLLM, which keeps in all heads what streaming heads keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import pandas as pd
import torch
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

import hooks_impl
from experiments.framework.intervals import mean_of
from experiments.framework.plots import NO_PRESS
from experiments.testbed.facts import Task, answer_unseen
from press_core.budget import n_kept
from press_core.learned.calibration import CalibrationError
from press_core.learned.measured import HeadScores
from press_core.scope import InstalledPress
from press_core.select import best_first

UNIFORM, HEADWISE = "uniform", "head-wise"
ALL, ALONE = "all", "DuoAttention"
"""The mean over pairs in the table of differences, and the pair that is not in it: its heads do not
compete for a budget."""

_SINK, _LEAST = 4, 16
"""Attention sinks of streaming heads, and the fewest tokens that they keep in total."""

Make = Callable[[float], InstalledPress]
"""Makes a press from a compression ratio."""


# ---- the pairs -----------------------------------------------------------------------------------


class EvenKVzipPress(hooks_impl.KVzipPress):
    """KVzip with uniform budgets: every head keeps the same number of tokens."""

    def choose(self, scores: Tensor, n_joining: int = 0) -> Tensor:
        """Which tokens of a row each head keeps, `(L, H_kv, S)` bool, from scores of that shape."""
        raised = scores.clone()
        raised[..., : self.n_sink] = float("inf")
        return best_first(raised, n_kept(raised.shape[-1], self.compression_ratio))


def _snapkv(ratio: float) -> hooks_impl.SnapKVPress:
    # With the default window of 64, SnapKV could choose no tokens where 64 or fewer are kept.
    return hooks_impl.SnapKVPress(ratio, window_size=16)


def _shared(make: Callable[[float], Any]) -> Make:
    """AdaKV around the press of `make`."""
    return lambda ratio: hooks_impl.AdaKVPress(make(ratio))


def pairs(model: PreTrainedModel, task: Task) -> dict[str, tuple[str, Make, Make]]:
    """The compared pairs, as hook presses (patches leave the same bits).

    If no DuoAttention head scores of `model` are available, they are measured on further contexts
    of the task, drawn from another seed.

    Returns:
        By name of the head-wise press: the name of the uniform one, and how to make the uniform and
        the head-wise press.
    """
    length, expected = 1 + task.context, hooks_impl.ExpectedAttentionPress
    try:
        scores: Any = hooks_impl.DuoAttentionPress().find(model)
    except CalibrationError:
        (others,) = replace(task, samples=8, seed=task.seed + 1).batches()
        contexts = list(others.context_ids.split(1))
        scores = hooks_impl.DuoAttentionPress.measure(model, contexts, _SINK, length // 4)
    return {
        "AdaKV(SnapKV)": ("SnapKV", _snapkv, _shared(_snapkv)),
        "AdaKV(ExpectedAttention)": ("ExpectedAttention", expected, _shared(expected)),
        "AdaKV(Knorm)": ("Knorm", hooks_impl.KnormPress, _shared(hooks_impl.KnormPress)),
        "CriticalAdaKV(SnapKV)": (
            "CriticalKV(SnapKV)",
            lambda ratio: hooks_impl.CriticalKVPress(_snapkv(ratio)),
            lambda ratio: hooks_impl.CriticalAdaKVPress(_snapkv(ratio)),
        ),
        "DuoAttention": (
            "StreamingLLM",
            hooks_impl.StreamingLLMPress,
            partial(streaming, scores=scores, length=length),
        ),
        "KVzip": ("KVzip, uniform", EvenKVzipPress, hooks_impl.KVzipPress),
    }


def streaming(ratio: float, scores: HeadScores, length: int) -> hooks_impl.DuoAttentionPress:
    """The DuoAttention press that evicts a share as near to `ratio` as possible.

    The number of streaming heads is the smallest that can evict that share and keep `_LEAST` tokens
    each; their number of recent tokens is then chosen to evict exactly the share.

    Args:
        scores: DuoAttention scores of the heads.
        length: number of tokens of a context.
    """
    n_heads = int(scores.scores.isfinite().sum())
    evicted = ratio * n_heads * length  # in all heads together
    n_streaming = min(n_heads, max(1, ceil(evicted / (length - _LEAST))))
    kept = max(_LEAST, round(length - evicted / n_streaming))
    return hooks_impl.DuoAttentionPress(
        n_streaming / n_heads, head_scores=scores, sink_size=_SINK, recent_size=kept - _SINK
    )


# ---- measuring -----------------------------------------------------------------------------------


def compare(
    model: PreTrainedModel, task: Task, ratios: Sequence[float], progress: Progress
) -> dict[str, pd.DataFrame]:
    """Answer all questions from caches with uniform and with head-wise budgets.

    Args:
        ratios: shares of the tokens to evict, in (0, 1).

    Returns:
        `headwise_accuracy`: a row per press and ratio with `pair`, `budgets`, `press` and `ratio`;
        the `accuracy` and its interval over contexts, `low` and `high`; the number of `contexts`,
        the words of a `context`, and its `facts`.
        `headwise_difference`: see `differences`.
    """
    presses: list[tuple[str, str, str, float, Any]] = [(NO_PRESS, "full", NO_PRESS, 0.0, None)]
    for pair, (uniform, make_uniform, make_headwise) in pairs(model, task).items():
        for ratio in ratios:
            presses.append((pair, UNIFORM, uniform, ratio, make_uniform(ratio)))
            presses.append((pair, HEADWISE, pair, ratio, make_headwise(ratio)))
    batches, rows, right = task.batches(), [], {}
    for pair, budgets, name, ratio, press in progress.track(presses, description="budgets"):
        answers = [answer_unseen(model, press, batch) == batch.answer_ids for batch in batches]
        of_contexts = torch.cat(answers).double().mean(dim=1).numpy()
        right[pair, ratio, budgets] = pd.Series(of_contexts)
        rows.append(
            {"pair": pair, "budgets": budgets, "press": name, "ratio": ratio}
            | mean_of("accuracy", of_contexts)
            | {"contexts": len(of_contexts), "context": task.context, "facts": task.facts}
        )
    return {"headwise_accuracy": pd.DataFrame(rows), "headwise_difference": differences(right)}


def differences(right: dict[tuple[str, float, str], pd.Series[float]]) -> pd.DataFrame:
    """Head-wise minus uniform accuracy, compared context by context.

    Args:
        right: the share of right answers of each context, by pair, ratio and kind of budgets.

    Returns:
        Columns `pair`, `ratio`, the `difference` of the accuracies, its interval `low` and `high`,
        and the number of `contexts`. The mean over the pairs whose heads share a budget is the pair
        `ALL`; the mean over all ratios is a row whose `ratio` is NaN.
    """
    both = {
        (pair, ratio): answers - right[pair, ratio, UNIFORM]
        for (pair, ratio, budgets), answers in right.items()
        if budgets == HEADWISE
    }
    gains = pd.concat(both, names=["pair", "ratio", "sample"]).rename("gain").reset_index()
    gains = pd.concat([gains, gains[gains["pair"] != ALONE].assign(pair=ALL)])
    gains = pd.concat([gains, gains.assign(ratio=float("nan"))])
    key = ["pair", "ratio"]
    how: Any = {"sort": False, "dropna": False}
    of_contexts = gains.groupby([*key, "sample"], **how)["gain"].mean().reset_index()
    rows = [
        dict(zip(key, place, strict=True))
        | mean_of("difference", of["gain"])
        | {"contexts": len(of)}
        for place, of in of_contexts.groupby(key, **how)
    ]
    return pd.DataFrame(rows)
