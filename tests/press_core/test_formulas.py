"""The formulas of single presses against slow references."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from press_core import formulas
from press_core.learned.kvzap import KVzap
from press_core.learned.measured import QFilter
from press_core.model.sites import Softmax
from press_core.observed import Query
from tests.press_core import slowly
from tests.press_core.drawn import FITS, KV, SITES, Prepared, drawn_call

LENGTH = 23
COMPACTOR = formulas.Compactor(0.3, 3, 2, chunk_size=4, sketch_dimension=5)


@dataclass
class Formula:
    """A press, its slow reference, how close they have to be, and what the press has learned."""

    press: Any
    slow: Callable[..., Tensor]
    protected: Collection[int] = ()
    kind: str = "plain"
    close: dict[str, float] = field(default_factory=lambda: {"rtol": 1e-5, "atol": 1e-6})
    known: Any = None

    def __str__(self):
        return f"{self.press}, {self.kind}"


def window_of(press, slow, kind="plain", **close):
    """Of a press that protects its window."""
    protected = range(LENGTH - press.window_size, LENGTH)
    return Formula(press, slow, protected, kind, close or {"rtol": 1e-5, "atol": 1e-6})


def lagkv(lag, **options):
    """Of which the last whole block is protected, as all that follows is."""
    last = 3 + ((LENGTH - 3) // lag - 1) * lag
    press = formulas.LagKV(0.5, n_sink=3, lag_size=lag, **options)
    return Formula(press, slowly.lagkv, {*range(3), *range(last, LENGTH)})


FORMULAS = [
    Formula(formulas.Knorm(0.5), slowly.knorm),
    Formula(formulas.KeyDiff(0.5), slowly.keydiff),
    lagkv(4, cross_scoring=True),
    *(
        window_of(formulas.SnapKV(0.5, *sizes), slowly.snapkv, kind)
        for sizes, kind in product(((1, 1), (6, 5), (7, 3), (LENGTH - 2, 5)), SITES)
    ),
    *(Formula(formulas.TOVA(0.5), slowly.tova, [LENGTH - 1], kind) for kind in SITES),
    *(
        Formula(formulas.ObservedAttention(0.5), slowly.observed_attention, (), kind)
        for kind in SITES
    ),
    *(
        Formula(press, slowly.expected_attention, range(press.n_sink))
        for press in (
            formulas.ExpectedAttention(n_future_positions=5),
            formulas.ExpectedAttention(n_future_positions=5, n_sink=0),
            formulas.ExpectedAttention(n_future_positions=1),
            formulas.ExpectedAttention(n_future_positions=5, use_covariance=False),
            formulas.ExpectedAttention(n_future_positions=5, use_vnorm=False),
            formulas.ExpectedAttention(n_future_positions=5, epsilon=0.02),
            formulas.ExpectedAttention(0.5, 5, 7, use_covariance=False, use_vnorm=False),
        )
    ),
    *(  # The rotation is averaged in the dtype of the model's own cosines, float32.
        Formula(press, slowly.cap, range(press.n_sink), close={"rtol": 1e-5, "atol": 1e-7})
        for press in (
            formulas.Cap(0.5, n_future_positions=9),
            formulas.Cap(0.5, tau=0.5, n_future_positions=1, n_sink=0, epsilon=0.1),
        )
    ),
    *(
        window_of(formulas.DropKV(0.5, *sizes, epsilon=1e-12), slowly.dropkv, rtol=1e-6, atol=1e-12)
        for sizes in ((1, 1), (5, 1), (4, 3))
    ),
    *(
        window_of(formulas.RKV(0.5, *options), slowly.rkv, rtol=1e-6, atol=1e-7)
        for options in (
            (1, 1, 1.0),
            (4, 3, 1.0),
            (8, 7, 0.1),
            (4, 7, 0.0, 0.3, 0),
            (4, 7, 0.0, 0.3, 1),
            (4, 7, 0.1, 0.0, 3),
            (4, 7, 0.0, 0.9, 1),
        )
    ),
    *(
        Formula(
            formulas.CUR(0.5, 4, whose, random, local, width),
            slowly.cur,
            range(4),
            close={"rtol": 1e-7, "atol": 1e-9},
        )
        for whose in ("key", "value", "kv_avg", "kv_product")
        for random, local, width in product((True, False), (True, False), (1, 5, 10**9))
    ),
    Formula(formulas.CUR(0.5, 0), slowly.cur, close={"rtol": 1e-7, "atol": 1e-9}),
    *(
        Formula(
            formulas.LeverageScore(0.5, width), slowly.leverage, close={"rtol": 1e-4, "atol": 1e-5}
        )
        for width in (1, 5, 12)
    ),
    *(
        Formula(formulas.NonCausalAttn(0.5, size), slowly.non_causal)
        for size in (1, 4, LENGTH - 1, LENGTH, 100)
    ),
    Formula(QFilter(0.5), slowly.qfilter, known=FITS["filters"]),
    *(Formula(KVzap(0.5), slowly.kvzap, known=FITS[name]) for name in ("linear", "mlp")),
    *(
        Formula(
            replace(COMPACTOR, sink_size_start=first, sink_size_end=last, blending=blending),
            slowly.compactor,
            {*range(first), *range(LENGTH - last, LENGTH)},
            close={"rtol": 1e-4, "atol": 1e-5},
        )
        for first, last in ((3, 2), (0, 0), (4, 0), (0, 1), (20, 2))
        for blending in (None, 0.0, 2.0)
    ),
]


@pytest.mark.parametrize("formula", FORMULAS, ids=str)
def test_against_the_slow_reference(formula):
    """Protected tokens are above all others."""
    call = drawn_call(LENGTH, site=SITES[formula.kind](), scope=Prepared(formula.known))
    scores, protected = formula.press.score(call), sorted(formula.protected)
    judged = [j for j in range(LENGTH) if j not in protected]
    for row, head in KV:
        of_head = scores[row, head]
        if len(judged) > 1:
            wanted = formula.slow(call, formula.press, row, head)[judged].to(scores.dtype)
            torch.testing.assert_close(of_head[judged], wanted, **formula.close)
        if protected:
            assert of_head[protected].min() > of_head[judged].max()


def test_dropkv_of_queries_that_see_almost_one_key_alone():
    """Their outputs are almost its value: only float32's rounding of an output is between them.

    An output is off by no more than that, and what it is off by is divided by epsilon and squared.
    """
    call = drawn_call(LENGTH, site=replace(SITES["plain"](), softmax=Softmax(8.0)))
    press, query = formulas.DropKV(0.5, 4, 1), Query(call.queries().float(), is_rotated=True)
    rounded = call.replace(keys=call.keys.float(), values=call.values.float(), query=query)
    found, wanted = press.score(rounded)[..., :-4], press.score(call)[..., :-4]
    rounding = torch.finfo(torch.float32).eps * call.values.norm(dim=-1).max() / press.epsilon
    torch.testing.assert_close(found, wanted.float(), rtol=0.2, atol=rounding.square().item())
