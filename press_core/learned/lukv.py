"""LU-KV (Tang et al., arXiv 2602.08585): head budgets from the measured utility of their keys."""

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
from press_core.fields import amount_field, count, limited, require_whole
from press_core.learned.calibration import Calibration, LearnedPress, learned, sized
from press_core.learned.running import Batch, LayerMeans, rows_alone, run
from press_core.model.sites import AttentionSite
from press_core.press import Press
from press_core.scope import bound_to
from press_core.scoring import SCORER, Around, BudgetPress
from press_core.select import best_first, leading, trailing, upcast
from press_core.traits import Evicts, Needs

PER_CENT = 99
"""Number of points of a curve: one per per cent of evicted tokens, from 1 to 99."""


@dataclass(frozen=True, eq=False, repr=False)
class BudgetCurves(Calibration):
    """The share of its tokens that each KV head evicts, for each compression ratio of the model.

    Attributes:
        rates: `(99, L, H_kv)`, in [0, 1], for compression ratios of 1, 2, ... 99 per cent.
    """

    kind = "LU-KV budget curves"
    made_by = "fit(model, token_batches, press)"
    file_names = ("lukv_curves.safetensors",)
    within = (0, 1)

    rates: Tensor = sized(f"{PER_CENT} layers kv_heads")


@dataclass
class LUKV(Around, BudgetPress, LearnedPress):
    """Keeps each KV head's best tokens, with head budgets by long-term utility (LU-KV, 2602.08585).

    How well a scorer predicts future attention differs from head to head. Curves measured on the
    model beforehand set how many tokens each head keeps, and the scores of `press` set which. Heads
    keep different numbers of tokens. Paper: Tang et al.

    Attributes:
        press: scores tokens (a ScorerPress or CriticalKVPress); its own ratio is not used. None:
            `ExpectedAttentionPress(epsilon=2e-2)`.
        compression_ratio: share of the tokens of all heads that is evicted, in [0, 1), rounded to
            per cents; or the `Tokens` that a head keeps on average, which is met exactly.
        sink, window: number of first and of last tokens that each head keeps before any others; the
            first of these, if its budget is smaller.
        curves: the curves of the model and `press` (see `fit`), their file, folder or hub id. None:
            the file `lukv_curves.safetensors` beside the model.
    """

    press: Press | None = limited(None, *SCORER)  # type: ignore[assignment]
    compression_ratio: Amount = amount_field()  # type: ignore[assignment]
    sink: int = count(4)
    window: int = count(1)
    curves: BudgetCurves | str | Path | None = learned(BudgetCurves)

    evicts = Evicts.PER_HEAD

    ranked_by: ClassVar[Callable[..., Any]]
    """Class of the default `press`, ExpectedAttention."""

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
        """The scores of `press`, `(B, H_kv, S)`, infinite for the first and last tokens."""
        protected = leading(call.keys, self.sink) | trailing(call.keys, self.window)
        return self.scorer.checked_scores(call).masked_fill(protected, float("inf"))

    def head_counts(self, call: AttentionCall) -> list[int]:
        """Number of tokens that each KV head of the layer keeps."""
        ratio, own = self.ratio_of(call), call.site.layer_idx
        evicted = call.prepared(self).rates[min(max(round(100 * ratio), 1), PER_CENT) - 1]
        if not isinstance(self.amount_of(call), Tokens):
            return head_counts(evicted[own].tolist(), call.length)
        pruned = sorted({site.layer_idx for site in call.scope.sites})
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
        """Measure the head budgets that keep the most utility at each compression ratio.

        The last tokens of each text (the horizon) stand in for the future: the utility of a key is
        the attention that it receives from them, times the norm of its value. Keys of a head are
        kept in the order of `press`, so each head has a curve of utility against tokens kept. For
        each ratio, the budgets with the greatest total utility are found on the concave hulls of
        these curves, for each text, and averaged over texts.

        Args:
            model: the model to calibrate; it is not changed.
            token_batches: token ids `(B, S)`, or dicts with `input_ids` and `attention_mask` for
                left-padded batches; padded rows are run one by one.
            press: the press that the curves are for. None: `ExpectedAttentionPress(epsilon=2e-2)`.
            horizon: number of last tokens that stand in for the future. None: an eighth of them.
            sink, window: fields of the LUKVPress that the curves are for.

        Returns:
            The curves, float32: pass them as `curves`, or save them beside the model.

        Raises:
            CalibrationError: if no text is long enough.
            HyperparameterError: if `horizon` is no number of tokens.
        """
        if horizon is not None:
            require_whole(1, horizon=horizon)
        lukv, means = cls(press, sink=sink, window=window), LayerMeans()
        scope = bound_to(lukv.scorer, model)
        for ids in rows_alone(token_batches):
            found: list[tuple[AttentionSite, Tensor]] = []

            def add(call: AttentionCall) -> None:
                n_future = call.length // 8 or 1 if horizon is None else horizon
                n = call.length - n_future
                if n > sink + window and lukv.is_long_enough(n):
                    found.append((call.site, lukv.gains(call.replace(scope=scope), n)))  # noqa: B023

            run(model, [ids], cls.collector(add, reads=lukv.scorer.all_needs | Needs.QUERIES))
            for text in zip(*(gains for _, gains in found), strict=True):
                rates = best_rates(torch.stack(text), sink + window)
                for (site, _), of_layer in zip(found, rates.unbind(dim=1), strict=True):
                    means.add(site, 1, of_layer)
        needed = f"{sink} + {window} protected tokens and the horizon"
        (rates,) = means.stacked(because=f": no text is longer than {needed}")
        return BudgetCurves(rates.transpose(0, 1).clamp(0, 1).float())

    def gains(self, call: AttentionCall, n: int) -> Tensor:
        """Utility of each head's first, second, ... of `n` keys, in the order of `press`.

        Returns:
            `(B, H_kv, n)`, float64 on the CPU.
        """
        order = self.ranked(call.chunk(0, n)).argsort(dim=-1, descending=True, stable=True)
        return future_worth(call, n).gather(-1, order).double().cpu()


def head_counts(evicted: Sequence[float], length: int, total: int | None = None) -> list[int]:
    """Number of `length` tokens that each head keeps.

    Args:
        evicted: share of the tokens that each head evicts, in [0, 1].
        length: number of tokens of the context.
        total: number of tokens that the heads keep together; None: the rounded sum of their shares.

    Returns:
        Counts with that sum, at least 1 each, by the method of largest remainders.
    """
    shares = [(1 - rate) * length for rate in evicted]
    return rounded(shares, round(sum(shares)) if total is None else total)


def exact_counts(evicted: Sequence[Sequence[float]], length: int, total: int) -> list[list[int]]:
    """Number of tokens that each head of each layer keeps, `total` together.

    Args:
        evicted: by layer and head, the share of the tokens that is evicted; the shares are scaled
            to match `total`.
        length: number of tokens of the context.
    """
    n_heads = sum(map(len, evicted))
    lost, wanted = sum(map(sum, evicted)), n_heads - total / length
    if lost > wanted:
        rates = [[rate * wanted / lost for rate in layer] for layer in evicted]
    else:
        scale = (n_heads - wanted) / max(n_heads - lost, 1e-12)
        rates = [[1 - (1 - rate) * scale for rate in layer] for layer in evicted]
    shares = [sum(1 - rate for rate in layer) * length for layer in rates]
    totals = rounded(shares, total, at_least=len(evicted[0]))
    return [head_counts(layer, length, n) for layer, n in zip(rates, totals, strict=True)]


def rounded(shares: Sequence[float], total: int, at_least: int = 1) -> list[int]:
    """Whole numbers near `shares` with sum `total`, each `at_least` or more: largest remainders."""
    counts = [max(at_least, int(share)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: max(0, total - sum(counts))]:
        counts[i] += 1
    while sum(counts) > total and max(counts) > at_least:  # some were raised to `at_least`
        counts[counts.index(max(counts))] -= 1
    return counts


# ---- learning ------------------------------------------------------------------------------------


def future_worth(call: AttentionCall, n: int) -> Tensor:
    """Utility of the first `n` keys of a text: attention from all tokens after them, times `‖v‖₂`.

    Returns:
        `(B, H_kv, n)`, float32; attention is averaged over queries and the GQA group.
    """
    received = mean_attention(call, call.queries(call.length - n))[..., :n]
    return received * upcast(call.values[:, :, :n]).norm(dim=-1)


def best_rates(gains: Tensor, n_protected: int) -> Tensor:
    """Share that each head evicts, at the least loss, if the model evicts 1, 2, ... 99 per cent.

    Args:
        gains: `(L, H_kv, n)`, the utility of each head's first, second, ... token.
        n_protected: number of first entries of `gains` that every head keeps.

    Returns:
        `(99, L, H_kv)`, float64.
    """
    n_layers, n_heads, n = gains.shape
    slopes = torch.full((n_layers * n_heads, n), float("inf"), dtype=torch.float64)
    for head, of_head in zip(slopes, gains.flatten(0, 1).tolist(), strict=True):
        head[n_protected:] = torch.tensor(concave(of_head[n_protected:]), dtype=torch.float64)
    # Steepest first; among equals, those of heads with fewer tokens so far.
    order = slopes.mT.flatten().argsort(descending=True, stable=True)
    of_head = order.argsort().view(n, -1).mT.contiguous()  # ranks, ascending
    kept = 1 - torch.arange(1, PER_CENT + 1, dtype=torch.float64) / 100
    totals = (kept * order.numel()).round().long()
    counts = torch.searchsorted(of_head, totals.expand(len(of_head), -1).contiguous())
    return 1 - counts.mT.reshape(PER_CENT, n_layers, n_heads).double() / n


def concave(gains: Sequence[float]) -> list[float]:
    """Increments of the concave hull of the cumulated `gains`, by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []  # sum and number of equal increments
    for gain in gains:
        total, count = gain, 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            previous = pools.pop()
            total, count = total + previous[0], count + previous[1]
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
