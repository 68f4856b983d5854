"""LU-KV (Tang et al., arXiv 2602.08585): head budgets by what each head's keys are worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from press_core.attention import mean_attention
from press_core.calibration import (
    Batch,
    Calibration,
    CalibrationError,
    check_fits,
    find,
    model_sizes,
    require_given,
    rows_alone,
    run,
)
from press_core.call import AttentionCall
from press_core.composite import Wrapper
from press_core.errors import first_line
from press_core.eviction import Eviction
from press_core.model.sites import AttentionSite
from press_core.press import Evicts, Needs, Press, TokenScorer, require
from press_core.scope import bind
from press_core.select import (
    Amount,
    Tokens,
    best_first,
    is_amount,
    leading,
    n_kept,
    trailing,
    upcast,
)

PER_CENT = 99
"""Curves have a value for each per cent of the tokens that may be evicted, from 1 to 99."""


@dataclass(frozen=True, eq=False, repr=False)
class BudgetCurves(Calibration):
    """What share of its tokens each KV head is to lose, by the share that the model is to lose.

    Attributes:
        rates: `(99, L, H_kv)`, in [0, 1]; the first are for one per cent.
    """

    kind: ClassVar[str] = "LU-KV budget curves"
    file_names: ClassVar[tuple[str, ...]] = ("lukv_curves.safetensors",)

    rates: Tensor

    def check(self) -> None:
        shape = tuple(self.rates.shape)
        if len(shape) != 3 or shape[0] != PER_CENT or 0 in shape:
            raise CalibrationError(f"rates of shape {shape}: they must be (99, L, H_kv)")
        if not bool(((self.rates >= 0) & (self.rates <= 1)).all()):
            raise CalibrationError("rates must be shares of the tokens, from 0 to 1")

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(("layers", "kv_heads"), self.rates.shape[1:], strict=True))

    @classmethod
    def load(cls, source: str | Path, file_names: tuple[str, ...] = ()) -> BudgetCurves:
        """As `Calibration.load`; also `.npy`, as the paper's authors publish curves."""
        path = Path(source).expanduser()
        if path.suffix != ".npy" or not path.is_file():
            return super().load(source, file_names)
        try:
            rates = torch.from_numpy(np.load(path, allow_pickle=False))
        except (OSError, ValueError, TypeError, EOFError, SyntaxError, MemoryError) as error:
            reason = first_line(error)
            raise CalibrationError(f"{str(path)!r} holds no table of numbers: {reason}") from error
        if not rates.is_floating_point():
            raise CalibrationError(f"{str(path)!r} holds {rates.dtype} numbers, not shares")
        return cls(upcast(rates))

    @classmethod
    def published(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        raise KeyError("nobody publishes them as safetensors")


@dataclass
class LUKV(Wrapper):
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

    press: Press = None  # type: ignore[assignment]
    compression_ratio: Amount = 0.0  # type: ignore[assignment]
    sink: int = 4
    window: int = 1
    curves: BudgetCurves | str | Path | None = None

    evicts = Evicts.PER_HEAD

    ranked_by: ClassVar[Callable[..., Any]]
    """Makes the press that ranks tokens where none is given, ExpectedAttention."""

    def __post_init__(self) -> None:
        if self.press is None:
            self.press = self._default_press()
        super().__post_init__()

    @classmethod
    def _default_press(cls) -> Press:
        press: Press = cls.ranked_by(epsilon=2e-2)
        return press

    def validate(self) -> None:
        super().validate()
        fits = is_amount(self.compression_ratio)
        require(self, "compression_ratio", fits, "a number in [0, 1), or the Tokens to keep")
        require(self, "sink", self.sink >= 0, "a number of tokens, 0 or more")
        require(self, "window", self.window >= 0, "a number of tokens, 0 or more")
        require_given(self, "curves", BudgetCurves)

    @property
    def amount(self) -> Amount:
        return self.compression_ratio

    @property
    def asked_ratio(self) -> float:
        ratio = self.compression_ratio
        return 0.0 if isinstance(ratio, Tokens) else float(ratio)

    def with_ratio(self, compression_ratio: Amount) -> Press:
        return replace(self, compression_ratio=compression_ratio)

    def budget(self, call: AttentionCall) -> int:
        return n_kept(call.context_length, self.compression_ratio)

    def evicts_of(self, length: int) -> bool:
        return self.is_long_enough(length) and n_kept(length, self.compression_ratio) < length

    def bind(self, model: Any) -> Press:
        make = f"{type(self).__name__}.fit(model, token_batches, press)"
        curves = find(BudgetCurves, self.curves, model, fit=make)
        return replace(self, press=self.press.bind(model), curves=curves)

    def check_site(self, site: AttentionSite) -> None:
        super().check_site(site)
        assert isinstance(self.curves, BudgetCurves)
        check_fits(self.curves, site)

    # ---- the formula -----------------------------------------------------------------------------

    def decide(self, call: AttentionCall) -> Eviction:
        if self.leaves_whole(call):
            return Eviction.nothing(call)
        scores = self.scorer.token_scores(call.with_budget(self.budget(call)))
        ranked = ranks_protected(scores, call.keys, self.sink, self.window)
        counts = torch.tensor(self.head_counts(call), device=scores.device).view(1, -1, 1)
        return Eviction.keep_per_head(call, best_first(ranked, counts.expand(len(scores), -1, -1)))

    def head_counts(self, call: AttentionCall) -> list[int]:
        """How many tokens each KV head of the layer keeps."""
        assert isinstance(self.curves, BudgetCurves)
        ratio, own = self.ratio_of(call.length), call.site.layer_idx
        evicted = self.curves.rates[min(max(round(100 * ratio), 1), PER_CENT) - 1]
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
        ranking = bind(cls(press, sink=sink, window=window).press, model).press  # type: ignore[arg-type]
        assert isinstance(ranking, TokenScorer)
        found = _Worth(ranking, horizon, sink, window)
        for ids in rows_alone(token_batches):
            run(model, [ids], cls.collector(found.see, reads=ranking.needs | Needs.QUERIES))
            found.allocate()
        return found.curves()


def ranks_protected(scores: Tensor, keys: Tensor, sink: int, window: int) -> Tensor:
    """`scores` with the first and last tokens above all others."""
    protected = leading(keys, sink) | trailing(keys, window)
    return scores.masked_fill(protected, float("inf"))


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


class _Worth:
    """What the tokens of texts turned out to be worth, and the budgets that follow from it."""

    def __init__(self, ranking: TokenScorer, horizon: int | None, sink: int, window: int) -> None:
        self.ranking, self.horizon, self.sink, self.window = ranking, horizon, sink, window
        self.n_layers = self.n_texts = 0
        self.sums: dict[int, Tensor] = {}
        self._gains: dict[int, Tensor] = {}

    def see(self, call: AttentionCall) -> None:
        """Take in a layer of some texts of one length."""
        self.n_layers = model_sizes(call.site)["layers"]
        n_future = call.length // 8 or 1 if self.horizon is None else self.horizon
        n = call.length - n_future
        if n <= self.sink + self.window or not self.ranking.is_long_enough(n):
            return
        context, worth = call.chunk(0, n), later_worth(call, n)
        ranked = ranks_protected(
            self.ranking.token_scores(context), context.keys, self.sink, self.window
        )
        order = ranked.argsort(dim=-1, descending=True, stable=True)
        self._gains[call.site.layer_idx] = worth.gather(-1, order).double().cpu()

    def allocate(self) -> None:
        """Find the best budgets for the texts seen last."""
        layers = sorted(self._gains)
        if not layers:
            return
        gains = torch.stack([self._gains.pop(layer) for layer in layers], dim=1)  # (B, L, H_kv, n)
        for text in gains:
            rates = best_rates(text, self.sink + self.window)
            for layer, of_layer in zip(layers, rates.unbind(dim=1), strict=True):
                self.sums[layer] = self.sums.get(layer, torch.zeros_like(of_layer)) + of_layer
        self.n_texts += len(gains)

    def curves(self) -> BudgetCurves:
        if not self.sums:
            raise CalibrationError(
                "token_batches holds no token to learn from: no text is longer than "
                f"{self.sink} + {self.window} protected tokens and those that stand for the future"
            )
        some = next(iter(self.sums.values()))
        rates = torch.zeros(PER_CENT, self.n_layers, some.shape[1], dtype=some.dtype)
        for layer, total in self.sums.items():
            rates[:, layer] = total / self.n_texts
        return BudgetCurves(rates.clamp(0, 1).float())


def later_worth(call: AttentionCall, n: int) -> Tensor:
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
