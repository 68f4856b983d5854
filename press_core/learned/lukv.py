"""LU-KV (Tang et al., arXiv 2602.08585): head budgets by what each head's keys are worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from press_core.attention import mean_attention
from press_core.budget import Amount, Tokens
from press_core.call import AttentionCall
from press_core.eviction import Eviction
from press_core.fields import amount_field, count, limited
from press_core.learned.calibration import Calibration, LearnedPress, learned, sized
from press_core.learned.running import Batch, LayerMeans, rows_alone, run
from press_core.model.sites import AttentionSite
from press_core.press import Press
from press_core.scope import bound_to
from press_core.scoring import SCORER, Around, BudgetPress
from press_core.select import best_first, leading, trailing, upcast
from press_core.traits import Evicts, Needs

PER_CENT = 99
"""Curves have a value for each per cent of the tokens that may be evicted, from 1 to 99."""


@dataclass(frozen=True, eq=False, repr=False)
class BudgetCurves(Calibration):
    """What share of its tokens each KV head is to lose, by the share that the model is to lose.

    Attributes:
        rates: `(99, L, H_kv)`, in [0, 1]; the first are for one per cent.
    """

    kind = "LU-KV budget curves"
    made_by = "fit(model, token_batches, press)"
    file_names = ("lukv_curves.safetensors",)
    within = (0, 1)

    rates: Tensor = sized(f"{PER_CENT} layers kv_heads")


@dataclass
class LUKV(Around, BudgetPress, LearnedPress):
    """Gives each KV head the budget that pays most in the long run (LU-KV, arXiv 2602.08585).

    How well a press tells which tokens will be needed differs from head to head. Curves that were
    measured on the model beforehand say how many tokens each head is to lose, the press says which.

    Attributes:
        press: scores tokens; what it is told to evict does not matter. By default
            `ExpectedAttentionPress(epsilon=2e-2)`.
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1), to the next
            per cent; or the `Tokens` that heads keep on average, which is met exactly.
        sink, window: first and last tokens, kept before all others.
        curves: those of the model and of `press` (see `fit`), or a file, a folder or a hub id.
            None: the file `lukv_curves.safetensors` beside the model.
    """

    press: Press | None = limited(None, *SCORER)  # type: ignore[assignment]
    compression_ratio: Amount = amount_field()  # type: ignore[assignment]
    sink: int = count(4)
    window: int = count(1)
    curves: BudgetCurves | str | Path | None = learned(BudgetCurves)

    evicts = Evicts.PER_HEAD

    ranked_by: ClassVar[Callable[..., Any]]
    """Makes the press that ranks tokens where none is given, ExpectedAttention."""

    def __post_init__(self) -> None:
        if self.press is None:
            self.press = type(self).ranked_by(epsilon=2e-2)
        super().__post_init__()

    # ---- the formula -----------------------------------------------------------------------------

    def spend(self, call: AttentionCall, n: int) -> Eviction:
        ranked = self.ranked(call.with_budget(n))
        counts = torch.tensor(self.head_counts(call), device=ranked.device).view(1, -1, 1)
        return Eviction.keep_per_head(call, best_first(ranked, counts.expand(len(ranked), -1, -1)))

    def ranked(self, call: AttentionCall) -> Tensor:
        """The scores of `press` with the first and last tokens above all others."""
        protected = leading(call.keys, self.sink) | trailing(call.keys, self.window)
        return self.scorer.checked_scores(call).masked_fill(protected, float("inf"))

    def head_counts(self, call: AttentionCall) -> list[int]:
        """How many tokens each KV head of the layer keeps."""
        ratio, own = self.ratio_of(call.length), call.site.layer_idx
        evicted = call.prepared(self).rates[min(max(round(100 * ratio), 1), PER_CENT) - 1]
        if not isinstance(self.compression_ratio, Tokens):
            return head_counts(evicted[own].tolist(), call.length)
        sites = [call.site] if call.scope is None else call.scope.sites
        pruned = sorted({site.layer_idx for site in sites})
        total = self.budget(call) * evicted.shape[1] * len(pruned)
        return exact_counts(evicted[pruned].tolist(), call.length, total)[pruned.index(own)]

    # ---- learning --------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        model: Any,
        token_batches: Iterable[Batch],
        press: Press | None = None,
        *,
        horizon: int | None = None,
        sink: int = 4,
        window: int = 1,
    ) -> BudgetCurves:
        """Measure which budgets of heads lose least of what the model will read.

        The last tokens of each text stand for the future: what a key is worth is the attention that
        it gets from them, times the norm of its value. Each head's keys are taken in the order of
        `press`; of all budgets that spend as much, those are found whose keys are worth most (on
        the concave hull of what each head gains by one more token), text by text, and averaged.

        Args:
            model: left as it was.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` where
                rows are padded on the left; those rows are run one by one.
            press: that the curves are for. None: `ExpectedAttentionPress(epsilon=2e-2)`.
            horizon: how many of the last tokens stand for the future. None: an eighth of them.
            sink, window: of the press that the curves are for.

        Returns:
            The curves, float32: to hand over as `curves`, or to save beside the model.

        Raises:
            CalibrationError: if no text is long enough.
        """
        told, means = cls(press, sink=sink, window=window), LayerMeans()
        scope = bound_to(told.scorer, model)
        for ids in rows_alone(token_batches):
            seen: list[tuple[AttentionSite, Tensor]] = []

            def see(call: AttentionCall) -> None:
                n_future = call.length // 8 or 1 if horizon is None else horizon
                n = call.length - n_future
                if n > sink + window and told.is_long_enough(n):
                    seen.append((call.site, told.gains(call.replace(scope=scope), n)))  # noqa: B023

            run(model, [ids], cls.collector(see, reads=told.scorer.needs | Needs.QUERIES))
            for text in zip(*(gains for _, gains in seen), strict=True):
                rates = best_rates(torch.stack(text), sink + window)
                for (site, _), of_layer in zip(seen, rates.unbind(dim=1), strict=True):
                    means.add(site, 1, of_layer)
        those = f"{sink} + {window} protected tokens and those that stand for the future"
        (rates,) = means.stacked(because=f": no text is longer than {those}")
        return BudgetCurves(rates.transpose(0, 1).clamp(0, 1).float())

    def gains(self, call: AttentionCall, n: int) -> Tensor:
        """What each head gains by its first, second, ... of `n` keys, in the order of `press`.

        Returns:
            `(B, H_kv, n)`, float64 on the CPU.
        """
        order = self.ranked(call.chunk(0, n)).argsort(dim=-1, descending=True, stable=True)
        return future_worth(call, n).gather(-1, order).double().cpu()


def head_counts(evicted: Sequence[float], length: int, total: int | None = None) -> list[int]:
    """How many of `length` tokens each head keeps that is to lose the share `evicted` of them.

    Args:
        total: how many they keep together; None: what the shares come to, rounded.

    Returns:
        Whole numbers of that sum, at least 1 each: rounded up where the remainders are largest.
    """
    shares = [(1 - rate) * length for rate in evicted]
    return rounded(shares, round(sum(shares)) if total is None else total)


def exact_counts(evicted: Sequence[Sequence[float]], length: int, total: int) -> list[list[int]]:
    """How many tokens the heads of all layers keep, `total` of them together.

    Args:
        evicted: by layer and head, the share to lose; scaled so that `total` is left.
    """
    n_heads = sum(map(len, evicted))
    lost, wanted = sum(map(sum, evicted)), n_heads - total / length
    if lost > wanted:
        rates = [[rate * wanted / lost for rate in layer] for layer in evicted]
    else:
        left = (n_heads - wanted) / max(n_heads - lost, 1e-12)
        rates = [[1 - (1 - rate) * left for rate in layer] for layer in evicted]
    shares = [sum(1 - rate for rate in layer) * length for layer in rates]
    totals = rounded(shares, total, at_least=len(evicted[0]))
    return [head_counts(layer, length, n) for layer, n in zip(rates, totals, strict=True)]


def rounded(shares: Sequence[float], total: int, at_least: int = 1) -> list[int]:
    """Whole numbers near `shares` whose sum is `total`, none of them less than `at_least`."""
    counts = [max(at_least, int(share)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: max(0, total - sum(counts))]:
        counts[i] += 1
    while sum(counts) > total and max(counts) > at_least:  # some were raised to the least
        counts[counts.index(max(counts))] -= 1
    return counts


# ---- learning ------------------------------------------------------------------------------------


def future_worth(call: AttentionCall, n: int) -> Tensor:
    """What the first `n` keys of a text are worth to all later tokens: attention times value.

    Returns:
        `(B, H_kv, n)`, float32: mean over queries and group, times the norm of values.
    """
    received = mean_attention(call, call.queries(call.length - n))[..., :n]
    return received * upcast(call.values[:, :, :n]).norm(dim=-1)


def best_rates(gains: Tensor, n_protected: int) -> Tensor:
    """What share each head loses where the model loses 1, 2, ... 99 per cent at the least cost.

    Args:
        gains: `(L, H_kv, n)`, what each head gains by its first, second, ... token.
        n_protected: of these the first, which every head keeps.

    Returns:
        `(99, L, H_kv)`, float64.
    """
    n_layers, n_heads, n = gains.shape
    slopes = torch.full((n_layers * n_heads, n), float("inf"), dtype=torch.float64)
    for head, of_head in zip(slopes, gains.flatten(0, 1).tolist(), strict=True):
        head[n_protected:] = torch.tensor(concave(of_head[n_protected:]), dtype=torch.float64)
    # The steepest first; of equal ones those of heads that hold less.
    order = slopes.mT.flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    of_head = rank.view(n, -1).mT.contiguous()  # ascending
    left = 1 - torch.arange(1, PER_CENT + 1, dtype=torch.float64) / 100
    totals = (left * rank.numel()).round().long()
    counts = torch.searchsorted(of_head, totals.expand(len(of_head), -1).contiguous())
    return 1 - counts.mT.reshape(PER_CENT, n_layers, n_heads).double() / n


def concave(gains: Sequence[float]) -> list[float]:
    """The steps of the concave hull of the sums of `gains`: neighbours that rise are averaged."""
    pools: list[tuple[float, int]] = []  # sum and number of steps of one height
    for gain in gains:
        total, count = gain, 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
