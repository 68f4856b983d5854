"""Speed, memory and what fits: what is slow is found slow, what is large large."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
import torch
from rich.progress import Progress
from typer.testing import CliRunner

from experiments import UserError
from experiments.cli import app
from experiments.framework import timing
from experiments.framework.options import chosen_device, n_bytes
from experiments.framework.timing import Stopwatch
from experiments.questions import throughput
from experiments.questions.throughput import (
    EXPERIMENT,
    Options,
    Part,
    beside,
    cells,
    fits,
    speed,
)
from experiments.questions.throughput.cells import FULL, Condition, Shape, Subject
from experiments.questions.throughput.space import Run, peak_of
from experiments.testbed.facts import build_tokenizer
from tests.support import build, snapshot, token_ids

TINY = Subject("tiny", shape=(("num_layers", 2),))
SNAP = Condition("SnapKVPress", "hook", 0.5)


@pytest.fixture(scope="module")
def model():
    return TINY.load()


@pytest.fixture(scope="module")
def rows(model):
    """Two presses, both mechanisms, one ratio, on a tiny model."""
    asked = cells.conditions(["SnapKVPress", "ThinKPress"], [0.5])
    before = snapshot(model)
    opened = {one: cells.scope_of(one, model, 128) for one in asked}
    found = list(speed.speeds(model, opened, 128, 2, speed.Effort(tokens=2, rounds=3)))
    assert snapshot(model) == before
    return [{"model": "tiny", **row} for row in found]


# ---- speed ---------------------------------------------------------------------------------------


def test_what_is_asked():
    asked = cells.conditions(["A", "B"], [0.5, 0.8])
    assert asked[0] == FULL
    assert len(asked) == 1 + 2 * 2 * 2
    assert cells.conditions(["A"], [0.5], ["hook"]) == [FULL, Condition("A", "hook", 0.5)]


def test_bytes_are_those_of_arithmetic(rows):
    by = {(row["press"], row["mechanism"]): row for row in rows}
    assert len(by) == 5
    full = by["no press", "bare"]["bytes"]
    assert full == 2 * 2 * 2 * 16 * 128 * 4 * 2  # layers, k and v, heads, channels, ... rows
    for press, share in (("SnapKVPress", 0.5), ("ThinKPress", 0.75)):
        for mechanism in ("hook", "patch"):
            assert (
                by[press, mechanism]["bytes"] == by[press, mechanism]["predicted"] == full * share
            )


def test_the_model_without_a_press_is_the_measure(rows):
    bare, *others = rows
    assert bare["first"] == bare["speed"] == 1
    for row in others:
        assert np.isnan(row["first_low"])  # of three rounds
        assert ("speed_over_hook" in row) == (row["mechanism"] == "patch")
        assert row["tokens_per_s"] > 0


class Clock:
    """A clock that only `spend` moves."""

    now = 0.0

    def spend(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


def test_a_slow_press_is_found_slow(model, monkeypatch):
    """A prefill takes a second and a step a tenth; one press triples the prefill, halves steps."""
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    factors = {FULL: (1, 1), SNAP: (3, 0.5), SNAP._replace(mechanism="patch"): (6, 0.25)}
    now = [(1, 1)]

    def spend(module, args, kwargs):
        first, step = now[0]
        clock.spend(first if kwargs["input_ids"].shape[1] > 1 else 0.1 * step)

    def opens(condition):
        @contextmanager
        def scope():
            now[0] = factors[condition]
            yield

        return scope

    handle = model.register_forward_pre_hook(spend, with_kwargs=True)
    opened = {condition: opens(condition) for condition in factors}
    found = list(speed.speeds(model, opened, 64, 4, speed.Effort(tokens=2, rounds=6)))
    handle.remove()
    bare, hook, patch = found
    assert bare["first_ms"] == pytest.approx(1000)
    assert bare["tokens_per_s"] == pytest.approx(4 / 0.1)
    assert [hook["first"], hook["speed"]] == pytest.approx([3, 2])
    assert [patch["first_over_hook"], patch["speed_over_hook"]] == pytest.approx([2, 2])


def test_compiled_and_eager_steps_take_turns(model, monkeypatch):
    calls = []

    def compiled(model, dynamic):
        def run(**kwargs):
            calls.append(kwargs["input_ids"].shape[1])
            return model(**kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    ids = token_ids(1, 64)
    taken = cells.compiled_steps(model, ids, cells.scope_of(SNAP, model, 64), tokens=2, rounds=3)
    assert len(taken) == 3
    assert all(eager > 0 and graphs > 0 for eager, graphs in taken)
    assert calls == [1] * (cells.SETTLING + 2 * 3)


def test_a_stopwatch_tells_laps_apart(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    watch = Stopwatch(torch.device("cpu"))
    clock.spend(2)
    watch.lap()
    clock.spend(3)
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


# ---- memory --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peaks():
    deep = Subject("deep", shape=(("num_layers", 8), ("head_dim", 64)))
    asked = {"short": (FULL, 512), "long": (FULL, 4096), "pruned": (SNAP._replace(ratio=0.9), 4096)}
    return {name: peak_of(deep, Run(*one, batch=1, tokens=1)) for name, one in asked.items()}


def test_peaks_hold_the_cache_at_least(peaks):
    shape = Shape(layers=8, kv_heads=2, head_dim=64, itemsize=4)
    assert peaks["long"] > shape.nbytes(4096)
    assert peaks["long"] > 3 * peaks["short"]
    assert peaks["pruned"] < peaks["long"] - 0.25 * shape.nbytes(4096)


def test_a_run_that_fails_says_why():
    with pytest.raises(RuntimeError, match="there is no folder 'no/such/folder'"):
        peak_of(Subject("none", "no/such/folder"), Run(FULL, 32, 1, 1))


@pytest.mark.gpu
def test_peaks_on_a_gpu():
    subject = Subject("tiny", shape=TINY.shape, device="cuda")
    short, long = (peak_of(subject, Run(FULL, context, 1, 1)) for context in (128, 4096))
    assert Shape.of(subject.load()).nbytes(4096) < long
    assert short < long


# ---- what fits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("true", [1, 2, 7, 100, 5000])
@pytest.mark.parametrize("guess", [1, 90, 6000])
def test_bisection_finds_what_fits(true, guess):
    found, tried = fits.largest(lambda n: n <= true, guess)
    assert true - max(1, fits.PRECISION * true) <= found <= true
    assert tried < 45


def test_bisection_ends_where_all_or_nothing_fits():
    assert fits.largest(lambda n: True, 3, most=10)[0] == 10
    assert fits.largest(lambda n: False, 3)[0] == 0


def test_arithmetic_of_what_fits(model):
    budget = fits.Budget.of(model)
    assert budget.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert budget.cache == 2 * 2 * 2 * 16 * 4
    limit = budget.weights + 100 * (budget.cache + budget.working)
    assert budget.tokens(limit, 0.0) == 100
    assert budget.tokens(limit, 0.5) > 100  # of two layers, one is there whole meanwhile
    assert budget.tokens(budget.weights - 1, 0.5) == 0


def test_what_fits_is_found_by_measuring(model, monkeypatch):
    """A press that takes 10 bytes a token, whatever arithmetic says."""
    monkeypatch.setattr(fits, "peak_of", lambda _, run: 10 * run.context * run.batch)
    budget = fits.Budget.of(model)
    limit = budget.weights + 10 * 3000
    row = fits.fitting_row(TINY, budget, SNAP, limit, "context", 2)
    assert 1500 * (1 - 2 * fits.PRECISION) <= row["measured"] <= 1500
    assert row["peak"] == 20 * row["measured"]
    row = fits.fitting_row(TINY, budget, SNAP, limit, "batch", 1000)
    assert row["measured"] in (2, 3)
    monkeypatch.setattr(fits, "peak_of", lambda _, run: None)  # killed for too much memory
    assert fits.fitting_row(TINY, budget, SNAP, limit, "batch", 1000)["measured"] == 0


def test_a_limit_below_the_weights_is_refused():
    with pytest.raises(UserError, match=r"the weights of .* alone take"):
        throughput.measure_fits(Options(limit="1KiB"), ["KnormPress"], None)


# ---- bytes, by arithmetic ------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untouched_cache_is_as_large_as_predicted(family, dtype):
    model = build(family, num_layers=3, dtype=dtype)
    took = cells.answer(model, token_ids(1, 37), cells.scope_of(FULL, model, 37), 1)
    assert took.n_bytes == Shape.of(model).nbytes(37)


def test_sliding_windows_are_refused():
    with pytest.raises(UserError, match="keep a sliding window"):
        Shape.of(build("gemma2", attn_implementation="eager"))


# ---- kvpress -------------------------------------------------------------------------------------


def test_kvpress_is_asked_in_its_own_process(tmp_path, monkeypatch):
    """A process that prints what it was asked stands for the environment with kvpress."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nsed 's/^/[{\"asked\": /; s/$/}]/'\n")
    fake.chmod(0o755)
    asked = beside.asked_of(TINY, ["KnormPress"], [0.5], [(128,), (1,)], speed.Effort(2, 3))
    (heard,) = beside.rows_of_kvpress(fake, asked)["asked"]
    assert heard[1:] == [["KnormPress"], [0.5], [128], [1], 2, 3]
    assert heard[0]["name"] == "tiny"
    fake.write_text("#!/bin/sh\necho no luck >&2; exit 3\n")
    with pytest.raises(UserError, match="failed: no luck; try --no-kvpress"):
        beside.rows_of_kvpress(fake, asked)


def test_kvpress_beside_us():
    python = beside.python_with_kvpress()
    if python is None:
        pytest.skip("kvpress is not installed: `make test-oracle` does that")
    presses = ["KnormPress", "AdaKVPress"]
    asked = beside.asked_of(TINY, presses, [0.5], [(128,), (1,)], speed.Effort(2, 2))
    table = beside.rows_of_kvpress(python, asked)
    assert table["press"].tolist() == presses
    assert (table["mechanism"] == "kvpress").all()
    assert (table["speed_over_hook"] > 0).all()


# ---- what is told --------------------------------------------------------------------------------


def told(**changed):
    """A table of one press at two contexts, hook, patch and kvpress."""
    rows = []
    for context in (1024, 4096):
        for press, mechanism, rate in (
            ("no press", "bare", 100.0),
            ("SnapKVPress", "hook", 150.0),
            ("SnapKVPress", "patch", 148.0),
            ("SnapKVPress", "kvpress", 90.0),
        ):
            ratio = 0.0 if press == "no press" else 0.8
            n_bytes = context * 1000 * (1 - ratio)
            times = {"first": 1.1, "speed": rate / 100, "speed_over_hook": rate / 150}
            spread = {f"{n}_{end}": v for n, v in times.items() for end in ("low", "high")}
            rows.append(
                {"model": "tiny", "context": context, "batch": 4, "press": press}
                | {"mechanism": mechanism, "ratio": ratio, **times, **spread}
                | {"first_ms": 9.0, "tokens_per_s": rate, "compiled": 1.5}
                | {"bytes": n_bytes, "predicted": n_bytes, "peak": 5e6 - 1e6 * ratio}
            )
    return pd.DataFrame(rows).assign(**changed)


FITS = pd.DataFrame(
    [
        ("tiny", "context", 1, "no press", "bare", 0.0, 2**27, 1000, 1200),
        ("tiny", "context", 1, "SnapKVPress", "hook", 0.8, 2**27, 2500, 3600),
        ("tiny", "batch", 512, "no press", "bare", 0.0, 2**27, 2, 3),
        ("tiny", "batch", 512, "SnapKVPress", "hook", 0.8, 2**27, 5, 7),
    ],
    columns=[
        *("model", "what", "other", "press", "mechanism", "ratio"),
        *("limit", "measured", "predicted"),
    ],
)


def first_table():
    rows = told()[lambda t: t["mechanism"].isin(["bare", "hook"]) & (t["context"] == 4096)]
    slow = rows[rows["press"] != "no press"].assign(press="KVzipPress", first=3.0)
    return pd.concat([rows, slow])


def test_findings_are_read_off_the_tables():
    tables = {"throughput": told(), "throughput_first": first_table(), "throughput_fits": FITS}
    found = {finding.name: finding for finding in EXPERIMENT.findings(tables)}
    assert found["speed"].text == (
        "SnapKV with 80% evicted decodes **1.50** [1.50, 1.50] times as many tokens per second as "
        "the full cache (4,096 tokens, batch 4)."
    )
    assert "Patches decode at least **0.99** [0.99, 0.99] times" in found["mechanisms"].text
    assert "kvpress decodes at least **0.60** [0.60, 0.60] times" in found["kvpress"].text
    assert "With **1** of 2 presses the first token comes within 1.10" in found["first"].text
    assert "at most **1.000** times the bytes" in found["bytes"].text
    assert "is 0.84 to **0.84** times" in found["peak"].text
    assert found["peak"].verdict == "works"
    assert "Within 128 MiB SnapKV with 80% evicted lets **2.50** times" in found["fits"].text


def test_a_press_that_slows_decoding_costs():
    slow, unclear = told(speed_low=0.9, speed_high=0.95), told(speed_low=0.9)
    assert EXPERIMENT.findings({"throughput": slow})[0].verdict == "costs"
    assert EXPERIMENT.findings({"throughput": unclear})[0].verdict is None


def test_tables_have_a_line_per_row():
    tables = {"throughput": told(), "throughput_first": first_table(), "throughput_fits": FITS}
    views = EXPERIMENT.views(tables)
    assert [len(view.rows) for view in views] == [8, 2, 4]
    assert views[0].rows[0][2:6] == ["no press", "", "9 ms", "100 /s"]
    assert views[1].rows[0][0] == "SnapKV"
    assert views[2].rows[1] == ["longest context", "SnapKV 80%", "2,500", "3,600", "2.50"]
    assert "0.67 to 0.83 of what arithmetic predicts" in EXPERIMENT.remarks(tables)[0]


def test_of_several_limits_the_largest_is_told():
    large = FITS.assign(model="large", limit=2**33, measured=FITS["measured"] * 2)
    large.loc[large["what"] == "context", "other"] = 32
    tables = {"throughput_fits": pd.concat([FITS, large])}
    (found,) = (each for each in EXPERIMENT.findings(tables) if each.name == "fits")
    assert "Within 8 GiB SnapKV" in found.text
    small, large = EXPERIMENT.views(tables)
    assert "what fits in 128 MiB" in small.note
    assert "large: what fits in 8 GiB" in large.note
    assert [row[0] for row in large.rows[1:3]] == [
        "longest context, batch 32",
        "largest batch of 512 tokens",
    ]
    panels = EXPERIMENT.figures(tables)["throughput_fits"].axes
    assert panels[0].get_title(loc="left") == "Longest context, batch 32"
    assert panels[0].patches[1].get_width() == 5000


def test_a_large_limit_is_for_a_large_cache(monkeypatch):
    asked = []

    def row(subject, budget, condition, limit, what, other):
        asked.append((subject.name, what, other))
        return {}

    monkeypatch.setattr(throughput, "fitting_row", row)
    told = {"batch": (32, 64), "context": (512,), "ratio": (0.8,)}
    throughput.measure_fits(Options(limit="8GiB", **told), [], Progress(disable=True))
    assert asked == [
        (throughput.LIKE_7B.name, "context", 32),
        (throughput.LIKE_7B.name, "batch", 512),
    ]
    asked.clear()
    throughput.measure_fits(Options(), [], Progress(disable=True))
    assert {name for name, *_ in asked} == {throughput.DEEP.name}


def test_figures_show_every_line():
    tables = {"throughput": told(), "throughput_first": first_table(), "throughput_fits": FITS}
    drawn = EXPERIMENT.figures(tables)
    (panel,) = drawn["throughput"].axes
    assert [line.get_ydata().tolist() for line in panel.get_lines()] == [
        [v, v] for v in (100, 150, 148, 90)
    ]
    assert [text.get_text() for text in panel.texts] == [
        "no press",
        "hook, 80% evicted",
        "patch, 80% evicted",
        "kvpress, 80% evicted",
    ]
    (panel,) = drawn["throughput_first"].axes
    assert [text.get_text() for text in panel.texts] == ["1.10", "3.00"]
    assert len(drawn["throughput_fits"].axes) == 2


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (Options(), tuple(Part)),
        (Options(model="facts-llama"), (Part.SPEED,)),
        (Options(model="facts-llama", limit="8GiB"), (Part.SPEED, Part.FITS)),
        (Options(model="facts-llama", part=(Part.FIRST_TOKEN,)), (Part.FIRST_TOKEN,)),
    ],
)
def test_what_is_measured_by_default(options, parts):
    assert options.parts == parts


def test_sizes():
    assert n_bytes("8GiB") == 8 * 2**30
    assert n_bytes("1.5 mb") == 1_500_000
    assert n_bytes("4096") == 4096
    for wrong in ("", "8 apples", "-1", "0"):
        with pytest.raises(ValueError, match="is no size"):
            n_bytes(wrong)


def test_auto_is_a_device():
    assert chosen_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert chosen_device("cuda:1") == "cuda:1"


# ---- command -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cli(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build("gpt_neox").save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    arguments = ["throughput", "--model", str(folder), "--no-kvpress"]
    return lambda *more: CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "160"})


def test_command_takes_lists_with_commas(cli, tmp_path):
    sizes = ["--context", "128,64", "--batch", "1", "--batch", "2", "--ratio", "0.5"]
    more = ["--rounds", "1", "--tokens", "1", "--no-compiled", "--no-memory"]
    result = cli("--press", "knorm,StreamingLLM", *sizes, *more, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "throughput.csv")
    assert len(table) == 2 * 2 * (1 + 2 * 2)
    assert set(table["context"]) == {64, 128}
    assert set(table["model"]) == {"tiny"}
    assert {path.name for path in tmp_path.iterdir()} == {"throughput.csv", "throughput.svg"}


def test_every_press_of_the_first_token_part(cli, tmp_path):
    part = ["--part", "first-token", "--every", "snapkv,expectedattention,cam", "--tokens", "1"]
    result = cli(*part, "--first-context", "128", "--rounds", "1", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "throughput_first.csv")
    assert set(table["press"]) == {"no press", "SnapKVPress", "ExpectedAttentionPress", "CAMPress"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "0.5,1"], "1.0 is not above 0 and below 1"),
        (["--context", "4k"], "cannot read '4k'"),
        (["--batch", "0"], "0 is less than 1"),
        (["--limit", "a lot"], "'a lot' is no size"),
        (["--dtype", "float8"], "'float8' is unknown"),
        (["--device", "nowhere"], "cannot use 'nowhere'"),
        (["--press", "SnapPress"], "there is no press 'SnapPress'"),
    ],
)
def test_command_says_what_is_wrong(cli, options, message):
    result = cli(*options)
    assert result.exit_code == 2
    assert message in result.output
