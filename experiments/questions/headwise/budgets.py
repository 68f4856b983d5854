"""Uniform against head-wise budgets: the same scores, shared out in two ways.

Each pair judges tokens in one way. Its *uniform* press keeps as many tokens in every head; its
*head-wise* press keeps as many in all, and lets heads (of a layer, or of the model) compete for
them. Both compress the same contexts of the facts task before any question is known, and answer
the same questions, so that they are compared context by context. DuoAttention is paired with
StreamingLLM: what its streaming heads keep, all heads keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import ceil, isnan
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hooks_impl
from experiments.framework.intervals import mean_interval
from experiments.framework.plots import NO_PRESS
from experiments.questions.headwise.asked import Asked, prefill_only
from press_core import attention_sites, cache_nbytes, kept_lengths
from press_core.budget import n_kept
from press_core.learned.calibration import CalibrationError
from press_core.learned.duo_attention import HeadScores
from press_core.scope import InstalledPress
from press_core.select import best_first

UNIFORM, HEADWISE = "uniform", "head-wise"
ALL = "all"
"""What the table of differences calls the mean over all pairs."""

_WINDOW = 16
"""Of SnapKV: its default of 64 would leave nothing to choose where less than that is kept."""
_SINK, _LEAST = 4, 16
"""First tokens that streaming heads keep, and the fewest tokens that they keep in all."""


class Pair(NamedTuple):
    """One way to judge tokens, with two kinds of budget.

    Attributes:
        name: of the pair, that of its head-wise press.
        uniform_name: of the other press.
        uniform, headwise: make the presses from the share of tokens to evict.
    """

    name: str
    uniform_name: str
    uniform: Callable[[float], InstalledPress]
    headwise: Callable[[float], InstalledPress]


# ---- the pairs -----------------------------------------------------------------------------------


def pairs(model: PreTrainedModel, task: Asked) -> list[Pair]:
    """Everything that is compared, installed by hooks (patches leave the same bits).

    Args:
        task: what will be asked; where nobody has measured the heads of `model` for DuoAttention,
            they are measured on other contexts of the same kind.
    """
    duo = partial(streaming, scores=head_scores(model, task), length=task.length)
    return [
        _shared("SnapKV", _snapkv),
        _shared("ExpectedAttention", hooks_impl.ExpectedAttentionPress),
        _shared("Knorm", hooks_impl.KnormPress),
        Pair(
            "CriticalAdaKV(SnapKV)",
            "CriticalKV(SnapKV)",
            lambda ratio: hooks_impl.CriticalKVPress(_snapkv(ratio)),
            lambda ratio: hooks_impl.CriticalAdaKVPress(_snapkv(ratio)),
        ),
        Pair("DuoAttention", "StreamingLLM", hooks_impl.StreamingLLMPress, duo),
        Pair("KVzip", "KVzip, uniform", EvenKVzipPress, hooks_impl.KVzipPress),
    ]


def _shared(name: str, scorer: Callable[[float], Any]) -> Pair:
    return Pair(f"AdaKV({name})", name, scorer, lambda r: hooks_impl.AdaKVPress(scorer(r)))


def _snapkv(ratio: float) -> hooks_impl.SnapKVPress:
    return hooks_impl.SnapKVPress(ratio, window_size=_WINDOW)


class EvenKVzipPress(hooks_impl.KVzipPress):
    """KVzip whose heads keep as many tokens each."""

    def choose(self, scores: dict[int, Tensor], n_joining: int = 0) -> dict[int, Tensor]:
        """Which tokens of a row each head keeps, `(H_kv, S)` bool per layer; from its scores."""
        chosen = {}
        for index, layer in scores.items():
            raised = layer.clone()
            raised[..., : self.n_sink] = float("inf")
            chosen[index] = best_first(raised, n_kept(layer.shape[-1], self.compression_ratio))[0]
        return chosen


def streaming(ratio: float, scores: HeadScores, length: int) -> hooks_impl.DuoAttentionPress:
    """The DuoAttention press that evicts the share `ratio`, or what comes nearest to it.

    As few heads stream as can give up that many tokens and still keep `_LEAST` each; they keep as
    many recent tokens as makes the share come out.

    Args:
        scores: of the heads.
        length: tokens of a context.
    """
    n_heads = int(scores.scores.isfinite().sum())
    evicted = ratio * n_heads * length  # in all heads together
    n_streaming = min(n_heads, max(1, ceil(evicted / (length - _LEAST))))
    kept = max(_LEAST, round(length - evicted / n_streaming))
    return hooks_impl.DuoAttentionPress(
        n_streaming / n_heads, head_scores=scores, sink_size=_SINK, recent_size=kept - _SINK
    )


def head_scores(model: PreTrainedModel, task: Asked) -> HeadScores:
    """DuoAttention's scores of the heads: what lies beside the model, or else measured."""
    try:
        known = hooks_impl.DuoAttentionPress().find(model)
    except CalibrationError:
        contexts = [ids for batch in task.others() for ids in task.contexts(batch)]
        return hooks_impl.DuoAttentionPress.measure(model, contexts, _SINK, task.length // 4)
    assert isinstance(known, HeadScores)
    return known


# ---- measuring -----------------------------------------------------------------------------------


class Held(NamedTuple):
    """What a press leaves of a cache.

    Attributes:
        shares: of its tokens that each head keeps, `(L, H_kv)`, mean over contexts.
        bytes: of key and value storage, spare room included.
    """

    shares: Tensor
    bytes: int


@torch.inference_mode()
def held(model: PreTrainedModel, press: InstalledPress | None, contexts: Sequence[Tensor]) -> Held:
    """What is held of contexts after their prefill."""
    shares, n_bytes = [], 0
    for ids in contexts:
        with nullcontext() if press is None else press(model):
            cache = prefill_only(model, ids)
        lengths = torch.stack([kept_lengths(cache)[s.layer_idx] for s in attention_sites(model)])
        shares.append(lengths.transpose(0, 1) / ids.shape[1])  # (rows, L, H_kv)
        n_bytes += cache_nbytes(cache)
    return Held(torch.cat(shares).mean(dim=0).cpu(), n_bytes)


def compare(
    model: PreTrainedModel,
    task: Asked,
    ratios: Sequence[float],
    *,
    model_name: str,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, pd.DataFrame]:
    """Answer all questions from caches with uniform and with head-wise budgets.

    Args:
        ratios: shares of the tokens to evict, in (0, 1).
        model_name: what the tables call the model.
        advance: called after each press.

    Returns:
        `headwise_accuracy`: a row per press and ratio: `pair`, `budgets`, `press`, `ratio`;
        `accuracy` with its interval over contexts, `low`, `high`; `evicted` share of tokens and
        `bytes` over those of the full cache, as measured on the first contexts; `contexts`,
        `answers`, `context` (words), `facts`, `model`.
        `headwise_difference`: head-wise minus uniform accuracy by `pair` and `ratio`, see
        `differences`.
    """
    first = task.contexts(task.batches[0])
    full = held(model, None, first).bytes
    presses: list[tuple[str, str, str, float, Any]] = [(NO_PRESS, "full", NO_PRESS, 0.0, None)]
    for pair in pairs(model, task):
        for ratio in ratios:
            presses += [
                (pair.name, UNIFORM, pair.uniform_name, ratio, pair.uniform(ratio)),
                (pair.name, HEADWISE, pair.name, ratio, pair.headwise(ratio)),
            ]
    rows, right = [], {}
    for name, budgets, press_name, ratio, press in presses:
        answers = torch.cat([task.right(model, press, batch) for batch in task.batches])
        right[name, ratio, budgets] = answers
        left = held(model, press, first)
        low, high = mean_interval(answers.double().mean(dim=1))
        rows.append(
            {"pair": name, "budgets": budgets, "press": press_name, "ratio": ratio}
            | {"accuracy": int(answers.sum()) / answers.numel(), "low": low, "high": high}
            | {"evicted": 1 - float(left.shares.mean()), "bytes": left.bytes / full}
            | {"contexts": len(answers), "answers": answers.numel()}
            | {"context": task.task.context, "facts": task.task.facts, "model": model_name}
        )
        advance()
    del right[NO_PRESS, 0.0, "full"]
    return {"headwise_accuracy": pd.DataFrame(rows), "headwise_difference": differences(right)}


COMPARED = (
    *("SnapKVPress", "ExpectedAttentionPress", "KnormPress", "AdaKVPress", "KVzipPress"),
    *("CriticalKVPress", "CriticalAdaKVPress", "StreamingLLMPress"),
)
"""The presses of the pairs, but DuoAttention, for which heads are measured first."""

N_PAIRS = 6
"""How many pairs there are: `compare` calls `advance` twice for each and ratio, and once more."""


# ---- differences ---------------------------------------------------------------------------------


def differences(right: dict[tuple[str, float, str], Tensor]) -> pd.DataFrame:
    """Head-wise minus uniform, compared context by context.

    Args:
        right: by pair, ratio and kind of budgets: which questions, `(contexts, facts)` bool.

    Returns:
        Columns `pair`, `ratio`, `difference` of the accuracies, `low` and `high` its interval,
        `contexts`. The mean over all pairs is there as the pair `ALL`, the mean over all ratios as
        a row whose `ratio` is missing.
    """
    pairs = dict.fromkeys(pair for pair, _, _ in right)
    ratios = dict.fromkeys(ratio for _, ratio, _ in right)
    rows = []
    for pair in (*pairs, ALL):
        for ratio in (*ratios, float("nan")):
            chosen = [
                right[name, share, HEADWISE].double() - right[name, share, UNIFORM].double()
                for name in pairs
                for share in ratios
                if pair in (name, ALL) and (ratio == share or isnan(ratio))
            ]
            per_context = torch.stack(chosen).mean(dim=(0, 2))
            interval = mean_interval(per_context)
            rows.append((pair, ratio, float(per_context.mean()), *interval, len(per_context)))
    columns = ["pair", "ratio", "difference", "low", "high", "contexts"]
    return pd.DataFrame(rows, columns=columns)
