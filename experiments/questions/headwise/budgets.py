"""Uniform against head-wise budgets: the same scores, shared out in two ways.

Each pair judges tokens in one way. Its *uniform* press keeps as many tokens in every head; its
*head-wise* press keeps as many in all, and lets the heads of a layer compete for them. Both
compress the same contexts of the facts task before any question is known, and answer the same
questions, so that they are compared context by context. DuoAttention is paired with StreamingLLM:
what its streaming heads keep, all heads keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import ceil, isnan
from typing import Any, NamedTuple

import pandas as pd
import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hooks_impl
from experiments.framework.intervals import mean_interval
from experiments.framework.plots import NO_PRESS
from experiments.testbed.asking import UNSEEN, Task
from press_core import attention_sites, cache_nbytes, kept_lengths
from press_core.learned.calibration import CalibrationError
from press_core.learned.measured import HeadScores
from press_core.scope import InstalledPress

UNIFORM, HEADWISE = "uniform", "head-wise"
ALL = "all"
"""What the table of differences calls the mean over all pairs."""

_SINK, _LEAST = 4, 16
"""First tokens that streaming heads keep, and the fewest tokens that they keep in all."""

_SCORERS: dict[str, Callable[[float], Any]] = {
    # Its default window of 64 would leave nothing to choose where less than that is kept.
    "SnapKV": partial(hooks_impl.SnapKVPress, window_size=16),
    "ExpectedAttention": hooks_impl.ExpectedAttentionPress,
    "Knorm": hooks_impl.KnormPress,
}
"""Presses by which tokens are judged with both kinds of budget, from the share to evict."""

COMPARED = (*(f"{name}Press" for name in _SCORERS), "AdaKVPress", "StreamingLLMPress")
"""The presses of the pairs, but DuoAttention, for which heads are measured first."""

N_PAIRS = len(_SCORERS) + 1


# ---- questions in words --------------------------------------------------------------------------


class Words:
    """The facts task in words, as any tokenizer reads them.

    Attributes:
        contexts: token ids of each context, `(S,)`.
        asked: by context, token ids of each question and of its answer.
    """

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        batches = task.batches(UNSEEN)
        texts = [batch.text(row) for batch in batches for row in range(len(batch.context_ids))]
        own: Any = tokenizer

        def ids(words: str, start: bool = False) -> Tensor:
            # What continues a text begins without special tokens.
            return torch.tensor(own(words, add_special_tokens=start).input_ids)

        self.contexts = [ids(text.context, start=True) for text in texts]
        self.asked = [
            [(ids(f" {q}"), ids(f" {a}")) for q, a in zip(*text[1:], strict=True)] for text in texts
        ]


class Answered(NamedTuple):
    """What came of all questions.

    Attributes:
        right: `(contexts, facts)` bool: an answer is if each of its tokens is the likeliest.
        evicted: share of the tokens, mean over heads and contexts.
        n_bytes: of key and value storage after the prefills, spare room included.
    """

    right: Tensor
    evicted: float
    n_bytes: int


@torch.inference_mode()
def answered(model: PreTrainedModel, press: InstalledPress | None, words: Words) -> Answered:
    """Compress each context, then ask every question of what is left."""
    right, kept, n_bytes, sites = [], [], 0, attention_sites(model)
    for ids, asked in zip(words.contexts, words.asked, strict=True):
        with nullcontext() if press is None else press(model):
            # Without the language-modelling head: nobody reads logits over the context.
            context = ids[None].to(model.device)
            cache = model.base_model(input_ids=context, use_cache=True).past_key_values
            n_bytes += cache_nbytes(cache)
            lengths = kept_lengths(cache)
            kept += [float(lengths[s.layer_idx].float().mean()) / len(ids) for s in sites]
            right.append(_right(model, cache, asked))
    return Answered(torch.tensor(right), 1 - sum(kept) / len(kept), n_bytes)


def _right(model: PreTrainedModel, cache: Any, asked: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Whether answers are right, each question with a copy of the cache; shorter ones are padded
    behind, where nothing attends."""
    rows = pad_sequence([torch.cat(pair)[:-1] for pair in asked], batch_first=True)
    cache.reorder_cache(torch.zeros(len(rows), dtype=torch.int64))
    logits = model(input_ids=rows.to(model.device), past_key_values=cache).logits
    likeliest = zip(logits.argmax(dim=-1).cpu(), asked, strict=True)
    return [torch.equal(row[len(q) - 1 :][: len(a)], a) for row, (q, a) in likeliest]


# ---- the pairs -----------------------------------------------------------------------------------


Make = Callable[[float], InstalledPress]
"""A press from the share of tokens to evict."""


def pairs(
    model: PreTrainedModel, task: Task, tokenizer: PreTrainedTokenizerBase
) -> dict[str, tuple[str, Make, Make]]:
    """Everything that is compared, installed by hooks (patches leave the same bits).

    Where nobody has measured the heads of `model` for DuoAttention, they are measured on contexts
    that are drawn as those of `task` are, and never asked about.

    Returns:
        By name of the head-wise press: the name of the uniform one, how that is made, and how the
        head-wise one is.
    """
    found: dict[str, tuple[str, Make, Make]] = {
        f"AdaKV({name})": (name, make, partial(_shared, make)) for name, make in _SCORERS.items()
    }
    others = Words(replace(task, samples=8, seed=task.seed + 1), tokenizer).contexts
    length = len(others[0])
    try:
        scores: Any = hooks_impl.DuoAttentionPress().find(model)
    except CalibrationError:
        contexts = [ids[None] for ids in others]
        scores = hooks_impl.DuoAttentionPress.measure(model, contexts, _SINK, length // 4)
    duo = partial(streaming, scores=scores, length=length)
    return found | {"DuoAttention": ("StreamingLLM", hooks_impl.StreamingLLMPress, duo)}


def _shared(make: Callable[[float], Any], ratio: float) -> hooks_impl.AdaKVPress:
    return hooks_impl.AdaKVPress(make(ratio))


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


# ---- measuring -----------------------------------------------------------------------------------


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    ratios: Sequence[float],
    progress: Progress,
) -> dict[str, pd.DataFrame]:
    """Answer all questions from caches with uniform and with head-wise budgets.

    Args:
        ratios: shares of the tokens to evict, in (0, 1).

    Returns:
        `headwise_accuracy`: a row per press and ratio: `pair`, `budgets`, `press`, `ratio`;
        `accuracy` with its interval over contexts, `low`, `high`; `evicted` share of tokens and
        `bytes` over those of the full cache, as measured; `contexts`, `answers`, `context` (words),
        `facts`.
        `headwise_difference`: head-wise minus uniform accuracy by `pair` and `ratio`, see
        `differences`.
    """
    presses: list[tuple[str, str, str, float, Any]] = [(NO_PRESS, "full", NO_PRESS, 0.0, None)]
    for pair, (uniform, make_uniform, make_headwise) in pairs(model, task, tokenizer).items():
        for ratio in ratios:
            presses.append((pair, UNIFORM, uniform, ratio, make_uniform(ratio)))
            presses.append((pair, HEADWISE, pair, ratio, make_headwise(ratio)))
    words, rows, right = Words(task, tokenizer), [], {}
    for name, budgets, press_name, ratio, press in progress.track(presses, description="budgets"):
        found = answered(model, press, words)
        right[name, ratio, budgets] = found.right
        low, high = mean_interval(found.right.double().mean(dim=1))
        rows.append(
            {"pair": name, "budgets": budgets, "press": press_name, "ratio": ratio}
            | {"accuracy": float(found.right.double().mean()), "low": low, "high": high}
            | {"evicted": found.evicted, "bytes": found.n_bytes}
            | {"contexts": len(found.right), "answers": found.right.numel()}
            | {"context": task.context, "facts": task.facts}
        )
    accuracy = pd.DataFrame(rows)
    accuracy["bytes"] /= accuracy["bytes"].iloc[0]
    del right[NO_PRESS, 0.0, "full"]
    return {"headwise_accuracy": accuracy, "headwise_difference": differences(right)}


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
