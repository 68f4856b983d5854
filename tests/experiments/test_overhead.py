"""Times taken in turn: what is slow is found slow, and nothing stays on the model."""

import gc
from collections import Counter
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.framework import timing
from experiments.framework.timing import Stopwatch, each_in_turn
from experiments.questions import overhead
from experiments.questions.overhead import EXPERIMENT, Options, Steps
from experiments.testbed.timed_models import FULL, Condition, conditions, scope_of
from press_core import kept_lengths
from tests.experiments.tiny import SILENT
from tests.support import token_ids, unchanged

HOOK, PATCH = (Condition("KnormPress", name, 0.5) for name in ("hook", "patch"))


# ---- taking times ------------------------------------------------------------------------------


def test_a_slow_mechanism_is_found_slow():
    seconds = {FULL: 0.002, HOOK: 0.002, PATCH: 0.004}
    times = each_in_turn(list(seconds), seconds.__getitem__, rounds=9)
    rows = pd.DataFrame(overhead.compare(times, model="none"))
    rows = rows.set_index(["mechanism", "baseline"])
    assert rows.loc["hook", "bare"]["ratio"] == pytest.approx(1)
    for baseline in ("bare", "hook"):
        row = rows.loc["patch", baseline]
        assert row["ratio"] == pytest.approx(2)
        assert row[["low", "high"]].isna().all()  # of rounds that are all alike
        assert row["units"] == "2 2 2 2 2 2 2 2 2"
    assert len(rows) == 3


def test_conditions_take_turns_and_the_first_round_does_not_count():
    order, advanced = [], []
    names = [FULL, HOOK, PATCH]

    def timed(name):
        order.append(name)
        return len(order)

    times = each_in_turn(names, timed, rounds=3, advance=lambda: advanced.append(1))
    assert order == names + names[1:] + names[:1] + names[2:] + names[:2] + names
    assert len(advanced) == 3
    assert [times[name].tolist() for name in names] == [[6, 8, 10], [4, 9, 11], [5, 7, 12]]


def test_an_error_inside_starts_the_garbage_collector_again():
    def fail(_):
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        each_in_turn([PATCH], fail, rounds=1)
    assert gc.isenabled()


def test_a_stopwatch_tells_laps_apart(monkeypatch):
    monkeypatch.setattr(timing, "perf_counter", iter((1, 3, 6)).__next__)
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        watch.lap()
    assert watch.seconds() == [2, 3]


@pytest.mark.gpu
def test_a_stopwatch_on_a_gpu():
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    watch = Stopwatch(device)
    for n in (1, 50):
        for _ in range(n):
            matrix @ matrix
        watch.lap()
    short, long = watch.seconds()
    assert 0 < short < long


# ---- decode steps ------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "n_on"), [(False, 3), (True, 3 * 7)])
def test_every_decode_step_starts_from_the_same_pruned_cache_in_its_own_scope(model, left, n_on):
    """Hooks and patches are on the layers in a scope's first step, or left there for all seven."""
    seen, attention = [], model.model.layers[0].self_attn
    scopes = {one: scope_of(one, model, 80) for one in conditions(["KnormPress"], [0.5])}
    if left:
        scopes = {one: partial(overhead.left_installed, opens) for one, opens in scopes.items()}

    def look(_, args, kwargs):
        on = (len(attention._forward_hooks), "forward" in vars(attention))
        lengths = kept_lengths(kwargs["past_key_values"])
        seen.append((on, [of_layer.tolist() for of_layer in lengths]))

    with unchanged(model), model.register_forward_pre_hook(look, with_kwargs=True):
        times = overhead.times_in_turn(scopes, Steps(model, 80), rounds=2)
    assert list(times) == list(scopes)
    bare = 3 * 3 * 7 - 2 * n_on  # rounds, conditions, steps
    assert Counter(on for on, _ in seen) == {(1, False): n_on, (0, True): n_on, (0, False): bare}
    assert all(kept == [[[40, 40]], [[40, 40]]] for _, kept in seen)


def test_the_first_model_is_timed_in_all_ways_and_compiled_anew_in_each_scope(monkeypatch):
    compiled = []

    def compile_(model, dynamic):
        if isinstance(model, torch.nn.Module):  # else: whether anything can be compiled
            compiled.append(model(token_ids(1, 80)).past_key_values.layers[0].keys.shape[2])
        return model

    monkeypatch.setattr(torch, "compile", compile_)
    options = Options(layers=(1, 2), press=("Knorm",), context=80, rounds=1, kvpress=False)
    table = EXPERIMENT.measure(options, SILENT)["overhead"]
    assert compiled == 2 * [80, 40, 40, 40, 40, 80]  # dynamic and static, in two rounds
    timed = [set(map(tuple, rows[["run", "cache"]].values)) for _, rows in table.groupby("model")]
    few = {("eager", "dynamic"), ("installed", "dynamic")}
    every = {*few, ("eager", "static"), ("compiled", "dynamic"), ("compiled", "static")}
    assert timed == [every, few]


# ---- what is told, and the command -------------------------------------------------------------


def told():
    """Three layers eager, four compiled; each ratio another."""
    kinds = [("hook", "bare"), ("patch", "bare"), ("patch", "hook"), ("kvpress", "bare")]
    rows = [
        {"model": f"{n} layers", "run": run, "cache": "dynamic", "press": "SnapKVPress"}
        | {"mechanism": mechanism, "baseline": baseline, "ratio": 1 + n / 100 + index / 1000}
        for n, run in ((3, "eager"), (4, "compiled"), (2, "eager"))
        for index, (mechanism, baseline) in enumerate(kinds)
    ]
    table = pd.DataFrame(rows)
    return table.assign(low=table["ratio"] - 0.01, high=np.nan, rounds=7)


def test_the_slowest_is_told():
    found = {finding.name: finding for finding in EXPERIMENT.findings({"overhead": told()})}
    numbers = {name: finding.number for name, finding in found.items()}
    eager, compiled = ("decode", "bare", "kvpress"), ("compiled", "kvpress-compiled")
    assert numbers == dict.fromkeys(eager, 1.03) | dict.fromkeys(compiled, 1.04)
    assert "(SnapKV, 3 layers)" in found["decode"].text
    assert found["decode"].verdict == "works"
    for slow in ({"ratio": 1.05}, {"high": 1.05}):  # the interval has to end below it too
        found = EXPERIMENT.findings({"overhead": told().assign(**slow)})
        verdicts = {finding.name: finding.verdict for finding in found}
        assert verdicts["decode"] == verdicts["compiled"] == "costs"
    another = told().assign(high=told()["model"].map({"2 layers": 1.05}))  # not the slowest
    assert EXPERIMENT.findings({"overhead": another})[0].verdict == "costs"
    eager, compiled = EXPERIMENT.contrasts({"overhead": told()})
    assert eager.bars == pytest.approx({"hooks": 1.03, "patches": 1.031, "kvpress": 1.033})
    assert compiled.bars == pytest.approx({"hooks": 1.04, "patches": 1.041, "kvpress": 1.043})


def test_the_figures_have_a_panel_per_model_and_the_table_a_line():
    figures = EXPERIMENT.figures({"overhead": told()})
    assert list(figures) == ["overhead", "overhead_compiled"]
    panels = [axes for figure in figures.values() for axes in figure.axes]
    drawn = [[line.get_xdata()[0] for line in axes.get_lines()[2::2]] for axes in panels]
    assert drawn == [pytest.approx([1 + n / 100 + i / 1000 for i in (0, 1, 3)]) for n in (3, 2, 4)]
    (view,) = EXPERIMENT.views({"overhead": told()})
    models = [("3 layers", "eager"), ("4 layers", "compiled"), ("2 layers", "eager")]
    assert [tuple(row[:4]) for row in view.rows] == [(*of, "dynamic", "SnapKV") for of in models]
    assert list(view.head[4:]) == ["hook / bare", "patch / bare", "patch / hook", "kvpress / bare"]
