"""Times taken in turn: what is slow is found slow, and nothing stays on the model."""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app
from experiments.framework import timing
from experiments.framework.command import progress_bar
from experiments.framework.timing import in_turn
from experiments.questions import overhead
from experiments.questions.overhead import (
    BARE,
    EMPTY_HOOK,
    EMPTY_WRAPPER,
    EXPERIMENT,
    Condition,
    Options,
)
from experiments.testbed.facts import build_tokenizer
from press_core import attention_sites, kept_lengths
from tests.support import build, snapshot, token_ids

SLOW = Condition("slow")
SMALL = Options(
    context=80,
    prefill_rounds=7,
    decode_rounds=7,
    scope_rounds=7,
    prefill_repeats=1,
    repeats=2,
)
SILENT = progress_bar(disable=True)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def table(model):
    before = snapshot(model)
    table = overhead.measure({"tiny": model}, SMALL, SILENT)
    assert snapshot(model) == before
    return table


class Clock:
    """A clock that only `spend` moves."""

    def __init__(self):
        self.now = 0.0

    def spend(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (overhead, timing):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


class Slow:
    """A mechanism that takes its time to enter and to leave, and while it is open."""

    def __init__(self, clock):
        self.clock, self.open = clock, False

    def __enter__(self):
        self.clock.spend(0.01)
        self.open = True

    def __exit__(self, *_):
        self.clock.spend(0.02)
        self.open = False

    def work(self):
        self.clock.spend(0.004 if self.open else 0.002)


# ---- taking times ------------------------------------------------------------------------------


def test_a_slow_mechanism_is_found_slow(clock):
    slow = Slow(clock)
    scopes = {BARE: nullcontext, EMPTY_HOOK: nullcontext, SLOW: lambda: slow}
    times = in_turn(scopes, slow.work, rounds=9)
    rows = overhead.compare(times, "none", "decode").set_index("mechanism")
    assert rows.loc["slow", "ratio"] == pytest.approx(2)
    assert rows.loc["slow", ["low", "high"]].isna().all()  # of rounds that are all alike
    assert rows.loc["empty hook", "ratio"] == pytest.approx(1)
    assert rows.loc["slow", "baseline_ms"] == pytest.approx(2)
    assert (rows["rounds"] == 9).all()


def test_slow_to_enter_and_slow_to_leave_are_told_apart(clock):
    slow = Slow(clock)
    scopes = {BARE: nullcontext, SLOW: lambda: slow}
    enter, leave = overhead.opening_in_turn(scopes, slow.work, rounds=3)
    assert enter[SLOW] == pytest.approx([0.01] * 3)
    assert leave[SLOW] == pytest.approx([0.02] * 3)
    assert enter[BARE] == pytest.approx([0.002] * 3)


def test_of_runs_in_a_row_the_quickest_counts(clock):
    seconds = iter([9, 9, 5, 1, 2, 7])  # the first round does not count
    times = in_turn({BARE: nullcontext}, lambda: clock.spend(next(seconds)), rounds=2, repeats=2)
    assert times[BARE].tolist() == [1, 2]


def test_conditions_take_turns_and_the_first_round_does_not_count():
    order, advanced = [], []

    @contextmanager
    def scope(name):
        order.append(name)
        yield

    names = [BARE, EMPTY_HOOK, SLOW]
    scopes = {name: lambda name=name: scope(name) for name in names}
    prepared, ran = [], []
    times = in_turn(
        scopes,
        lambda: ran.append(1),
        rounds=3,
        repeats=2,
        prepare=lambda: prepared.append(1),
        advance=lambda: advanced.append(1),
    )
    assert order == names + names[1:] + names[:1] + names[2:] + names[:2] + names
    assert len(ran) == len(prepared) == 4 * 3 * 2
    assert len(advanced) == 3
    assert {len(seconds) for seconds in times.values()} == {3}


def test_an_error_inside_closes_the_scope_and_starts_the_garbage_collector_again(clock):
    slow = Slow(clock)

    def fail():
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        in_turn({SLOW: lambda: slow}, fail, rounds=1)
    assert not slow.open
    assert gc.isenabled()


# ---- the empty mechanisms ----------------------------------------------------------------------


@pytest.mark.parametrize("empty", [overhead.empty_hooks, overhead.empty_wrappers])
def test_empty_mechanisms_change_nothing_and_leave_nothing(model, empty):
    before, expected = snapshot(model), model(token_ids(1, 9)).logits
    modules = [site.module for site in attention_sites(model)]
    with empty(modules):
        assert snapshot(model) != before
        assert torch.equal(model(token_ids(1, 9)).logits, expected)
    assert snapshot(model) == before


def test_empty_mechanisms_are_called(model, monkeypatch):
    called = []
    modules = [site.module for site in attention_sites(model)]
    monkeypatch.setattr(overhead, "_nothing", lambda *_: called.append("hook"))

    def pass_through(wrapped, _, args, kwargs):
        called.append("wrapper")
        return wrapped(*args, **kwargs)

    monkeypatch.setattr(overhead, "_pass_through", pass_through)
    with overhead.empty_hooks(modules), overhead.empty_wrappers(modules):
        model(token_ids(1, 9))
    assert called == ["hook", "wrapper", "hook"] * len(modules)


# ---- phases ------------------------------------------------------------------------------------


@torch.no_grad()
def test_every_decode_step_starts_from_the_same_pruned_cache(model, monkeypatch):
    seen = []

    def look(_, args, kwargs):
        cache = kwargs["past_key_values"]
        seen.append([lengths.tolist() for lengths in kept_lengths(cache)])

    with model.register_forward_pre_hook(look, with_kwargs=True):
        overhead.decode_times(model, SMALL)
    assert len(seen) == (SMALL.decode_rounds + 1) * SMALL.repeats * 7
    assert all(kept == [[[40, 40]], [[40, 40]]] for kept in seen)


def test_every_phase_has_every_condition(table):
    pressed = {(press, mechanism) for press in SMALL.press for mechanism in ("hook", "patch")}
    empty = {("no press", "empty hook"), ("no press", "empty wrapper")}
    assert set(table["phase"]) == {"call", "prefill", "decode", "enter", "leave"}
    for phase in ("prefill", "decode", "enter", "leave"):
        rows = table[(table["phase"] == phase) & (table["baseline"] == "bare")]
        assert set(zip(rows["press"], rows["mechanism"], strict=True)) == pressed | empty
        assert not rows.duplicated(["press", "mechanism", "compression_ratio"]).any()
    prefill = table[(table["phase"] == "prefill") & (table["press"] != "no press")]
    assert set(prefill["compression_ratio"]) == {0.0}


def test_every_mechanism_is_compared_with_its_own_empty_one(table):
    decode = table[table["phase"] == "decode"].groupby("mechanism")["baseline"].agg(set)
    assert decode["hook"] == {"bare", "empty hook"}
    assert decode["patch"] == {"bare", "empty wrapper", "hook"}
    assert decode["empty hook"] == {"bare"}


def test_ratios_lie_in_their_intervals(table):
    assert (table["low"] > 0).all()
    assert (table["low"] <= table["ratio"]).all()
    assert (table["ratio"] <= table["high"]).all()
    assert (table["rounds"] == 7).all()
    assert (table[["ms", "baseline_ms"]] > 0).all(axis=None)


def test_any_press_can_be_measured(model):
    names = tuple(sorted(overhead.MECHANISMS["hook"]))
    options = replace(SMALL, press=names, prefill_rounds=1, decode_rounds=1, scope_rounds=1)
    before = snapshot(model)
    table = overhead.measure({"tiny": model}, replace(options, repeats=1), SILENT)
    assert snapshot(model) == before
    for phase in ("prefill", "decode", "enter", "leave"):
        assert set(table.loc[table["phase"] == phase, "press"]) == {*names, "no press"}


def test_a_press_is_open_while_its_times_are_taken(model):
    """Prefill under a press leaves less than prefill without."""
    opened = []
    scopes = overhead.scopes(model, SMALL, (0.5,))
    for condition, scope in scopes.items():
        with scope():
            cache = model(token_ids(1, 80)).past_key_values
        opened.append((condition.mechanism, cache.layers[0].keys.shape[2]))
    assert opened == [
        ("bare", 80),
        ("empty hook", 80),
        ("empty wrapper", 80),
        *[("hook", 40), ("patch", 40)] * 2,
    ]
    assert list(scopes)[:3] == [BARE, EMPTY_HOOK, EMPTY_WRAPPER]


# ---- figure, summary, command ------------------------------------------------------------------


def test_figures_have_a_panel_per_phase_and_a_point_per_condition(table):
    points = [
        [line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() in ("o", "s")]
        for figure in EXPERIMENT.figures({"overhead": table}).values()
        for axes in figure.axes
    ]
    assert [len(p) for p in points] == [2 + 2 * 2] * 2
    rows = table[(table["phase"] == "decode") & (table["baseline"] == "bare")]
    assert sorted(points[0]) == sorted(rows["ratio"])


def test_summary_names_every_condition(table):
    text = EXPERIMENT.markdown({"overhead": table})
    assert text.count("| tiny | prefill |") == 2
    assert text.count("| tiny | decode |") == 2
    assert "To enter a scope on `tiny`" in text


@pytest.fixture(scope="module")
def cli(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    arguments = ["overhead", "--model", str(folder), "--context", "80", "--prefill-rounds", "2"]
    return lambda *more: CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "180"})


def test_command_writes_what_it_shows(cli, tmp_path):
    options = ["--press", "adakv", "--press", "KVzipPress"]
    result = cli("--decode-rounds", "2", "--output", str(tmp_path), *options)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "tiny decode AdaKV, 50% evicted" in shown
    assert "tiny decode KVzip, 50% evicted" in shown
    assert set(pd.read_csv(tmp_path / "overhead.csv")["model"]) == {"tiny", "empty module"}
    assert (tmp_path / "overhead.svg").stat().st_size > 3_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "1"], "ratio"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--press", "SnapPress"], "there is no press 'SnapPress'; there are AdaKV, Block, "),
    ],
)
def test_command_says_what_is_wrong(cli, options, message):
    result = cli(*options)
    assert result.exit_code == 2
    assert message in result.output
