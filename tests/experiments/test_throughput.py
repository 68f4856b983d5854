"""Speed, memory and what fits: what is slow is found slow, what is large large."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from experiments import UserError
from experiments.cli import app
from experiments.framework import timing
from experiments.framework.command import progress_bar
from experiments.framework.options import chosen_device, n_bytes
from experiments.questions import throughput
from experiments.questions.throughput import EXPERIMENT, Options, Part, memory
from experiments.questions.throughput.memory import Arithmetic, Run, peak_of
from experiments.questions.throughput.speed import answer, speeds
from experiments.testbed import with_kvpress
from experiments.testbed.facts import build_tokenizer
from experiments.testbed.timed_models import FULL, Condition, ModelSpec, conditions, scope_of
from experiments.testbed.with_kvpress import python_with_kvpress, rows_with_kvpress
from tests.support import build, snapshot, token_ids

TINY = ModelSpec("tiny", shape=(("num_layers", 2),))
SNAP = Condition("SnapKVPress", "hook", 0.5)
SILENT = progress_bar(disable=True)


@pytest.fixture(scope="module")
def model():
    return TINY.load()


# ---- speed ---------------------------------------------------------------------------------------


def test_caches_hold_the_bytes_of_arithmetic(model):
    before = snapshot(model)
    asked = conditions(["SnapKVPress", "ThinKPress"], [0.5])
    opened = {one: scope_of(one, model, 128) for one in asked}
    rows = list(speeds(model, opened, 128, 2, tokens=2, rounds=3))
    assert snapshot(model) == before
    full = 2 * 2 * 2 * 16 * 128 * 4 * 2  # layers, k and v, heads, channels, ... rows
    assert [row["bytes"] / full for row in rows] == [1, 0.5, 0.5, 0.75, 0.75]
    arithmetic = Arithmetic.of(model)
    assert [row["bytes"] for row in rows] == [arithmetic.cache_bytes(256, one) for one in asked]
    bare, *others = rows
    assert bare["first"] == bare["speed"] == 1
    for row in others:
        assert np.isnan(row["first_low"])  # of three rounds
        assert ("speed_over_hook" in row) == (row["mechanism"] == "patch")


def test_a_slow_press_is_found_slow(model, monkeypatch):
    """A prefill takes a second and a step a tenth; one press triples the prefill, halves steps."""
    clock = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: clock[0])
    factors = {FULL: (1, 1), SNAP: (3, 0.5), SNAP._replace(mechanism="patch"): (6, 0.25)}
    now = [(1, 1)]

    def spend(module, args, kwargs):
        first, step = now[0]
        clock[0] += first if kwargs["input_ids"].shape[1] > 1 else 0.1 * step

    def opens(condition):
        @contextmanager
        def scope():
            now[0] = factors[condition]
            yield

        return scope

    opened = {condition: opens(condition) for condition in factors}
    with model.register_forward_pre_hook(spend, with_kwargs=True):
        bare, hook, patch = speeds(model, opened, 64, 4, tokens=2, rounds=6)
    assert bare["first_ms"] == pytest.approx(1000)
    assert bare["tokens_per_s"] == pytest.approx(4 / 0.1)
    assert [hook["first"], hook["speed"]] == pytest.approx([3, 2])
    assert [patch["first"], patch["speed_over_hook"]] == pytest.approx([6, 2])


# ---- memory --------------------------------------------------------------------------------------


def test_peaks_hold_the_cache_at_least():
    deep = ModelSpec("deep", shape=(("num_layers", 8), ("head_dim", 64)))
    short, long, pruned = (
        peak_of(deep, Run(condition, n, 1, 1))
        for condition, n in ((FULL, 512), (FULL, 4096), (SNAP._replace(ratio=0.9), 4096))
    )
    cache = Arithmetic.of(deep.load()).cache_bytes(4096, FULL)
    assert long > max(cache, 3 * short)
    assert pruned < long - 0.25 * cache


def test_a_run_that_fails_says_why():
    with pytest.raises(Exception, match="there is no folder 'no/such/folder'"):
        peak_of(ModelSpec("none", "no/such/folder"), Run(FULL, 32, 1, 1))


@pytest.mark.gpu
def test_peaks_on_a_gpu():
    spec = TINY._replace(device="cuda")
    short, long = (peak_of(spec, Run(FULL, context, 1, 1)) for context in (128, 4096))
    assert Arithmetic.of(spec.load()).cache_bytes(4096, FULL) < long
    assert short < long


@pytest.mark.parametrize("true", [1, 2, 7, 100, 5000])
@pytest.mark.parametrize("guess", [1, 90, 6000])
def test_bisection_finds_what_fits(true, guess):
    found, tried = memory.largest(lambda n: n <= true, guess)
    assert true - max(1, memory.PRECISION * true) <= found <= true
    assert tried < 45


def test_bisection_ends_where_all_or_nothing_fits():
    assert memory.largest(lambda n: True, 3, most=10)[0] == 10
    assert memory.largest(lambda n: False, 3)[0] == 0


def test_arithmetic_of_what_fits(model):
    budget = Arithmetic.of(model)
    assert budget.weights == sum(parameter.nbytes for parameter in model.parameters())
    limit = budget.weights + 100 * (budget.cache + budget.working)
    assert budget.tokens(limit, FULL) == 100
    assert budget.tokens(limit, SNAP) > 100  # of two layers, one is there whole meanwhile
    assert budget.tokens(budget.weights - 1, SNAP) == 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untouched_cache_is_as_large_as_predicted(family, dtype):
    model = build(family, num_layers=3, dtype=dtype)
    took = answer(model, token_ids(1, 37), scope_of(FULL, model, 37), 1)
    assert took.n_bytes == Arithmetic.of(model).cache_bytes(37, FULL)


def test_sliding_windows_are_refused():
    with pytest.raises(UserError, match="keep a sliding window"):
        Arithmetic.of(build("gemma2", attn_implementation="eager"))


def test_what_fits_is_found_by_measuring(model, monkeypatch):
    """A press that takes 10 bytes a token, whatever arithmetic says."""
    monkeypatch.setattr(memory, "peak_of", lambda _, run: 10 * run.context * run.batch)
    budget = Arithmetic.of(model)
    limit = budget.weights + 10 * 3000
    row = memory.fitting_row(TINY, budget, SNAP, limit, "context", 2)
    assert 1500 * (1 - 2 * memory.PRECISION) <= row["measured"] <= 1500
    assert row["peak"] == 20 * row["measured"]
    row = memory.fitting_row(TINY, budget, SNAP, limit, "batch", 1000)
    assert row["measured"] in (2, 3)
    monkeypatch.setattr(memory, "peak_of", lambda _, run: None)  # killed for too much memory
    assert memory.fitting_row(TINY, budget, SNAP, limit, "batch", 1000)["measured"] == 0


def test_the_longest_context_and_the_largest_batch_are_sought(monkeypatch):
    with pytest.raises(UserError, match=r"the weights of .* alone take"):
        throughput.measure_fits(Options(limit="1KiB"), SILENT)
    monkeypatch.setattr(
        throughput, "fitting_row", lambda *asked: {"limit": asked[3], "asked": asked[4:]}
    )
    options = Options(limit="8GiB", batch=(32, 64), context=(512, 1024), press=("Knorm",))
    rows = throughput.measure_fits(options, SILENT)
    assert rows["asked"].tolist() == [("context", 32)] * 2 + [("batch", 512)] * 2
    assert set(rows["limit"]) == {8 * 2**30}


# ---- kvpress -------------------------------------------------------------------------------------


def test_kvpress_is_asked_in_its_own_process(tmp_path):
    """A process that prints what it was asked stands for the environment with kvpress."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nsed 's/^/[{\"asked\": /; s/$/}]/'\n")
    fake.chmod(0o755)
    (heard,) = rows_with_kvpress(fake, "module", spec=TINY, rounds=3)["asked"]
    assert heard == json.loads(json.dumps({"spec": TINY, "rounds": 3}))
    fake.write_text("#!/bin/sh\necho no luck >&2; exit 3\n")
    with pytest.raises(UserError, match="failed: no luck; try --no-kvpress"):
        rows_with_kvpress(fake, "module")


@pytest.mark.skipif(python_with_kvpress() is None, reason="kvpress: `make test-oracle` installs it")
def test_kvpress_beside_us():
    options = Options(press=("Knorm", "AdaKV"), context=(128,), batch=(1,), ratio=(0.5,))
    options = replace(options, part=(Part.SPEED,), memory=False, tokens=2, rounds=2)
    table = EXPERIMENT.measure(options, SILENT)["throughput"]
    theirs = table[table["mechanism"] == "kvpress"]
    assert theirs["press"].tolist() == ["KnormPress", "AdaKVPress"]
    assert (theirs["speed_over_hook"] > 0).all()


def test_time_inside_presses_is_that_of_the_oracle(monkeypatch):
    asked = []

    def output_of(python, *arguments):
        asked.append(arguments)
        return "press,ratio\nKnormPress,0.5\n"

    monkeypatch.setattr(throughput, "python_with_kvpress", lambda: "python")
    monkeypatch.setattr(throughput, "output_of", output_of)
    tables = EXPERIMENT.measure(Options(part=(Part.KVPRESS,)), SILENT)
    assert tables["throughput_kvpress"]["ratio"].tolist() == [0.5]
    assert asked == [("tests.oracle.timing", *throughput.INSIDE)]
    assert set(throughput.INSIDE) <= set(with_kvpress.import_module("hooks_impl").PRESSES)


# ---- what is told --------------------------------------------------------------------------------


def told(**changed):
    """A table of one press at two contexts, hook, patch and kvpress."""
    rows = []
    for context in (1024, 4096):
        for mechanism, rate in (
            ("bare", 100.0),
            ("hook", 150.0),
            ("patch", 148.0),
            ("kvpress", 90.0),
        ):
            press, ratio = ("no press", 0.0) if mechanism == "bare" else ("SnapKVPress", 0.8)
            times = {"first": 1.1, "speed": rate / 100, "speed_over_hook": rate / 150}
            spread = {f"{n}_{end}": v for n, v in times.items() for end in ("low", "high")}
            rows.append(
                {"model": "tiny", "context": context, "batch": 4, "press": press}
                | {"mechanism": mechanism, "ratio": ratio, **times, **spread}
                | {"first_ms": 9.0, "tokens_per_s": rate, "peak": 5e6}
                | {"bytes": context * 1000 * (1 - ratio), "predicted": context * 1000 * (1 - ratio)}
            )
    return pd.DataFrame(rows).assign(**changed)


def told_of_all():
    first = told()[lambda t: t["mechanism"].isin(["bare", "hook"]) & (t["context"] == 4096)]
    slow = first[first["press"] != "no press"].assign(press="KVzipPress", first=3.0)
    fits = pd.DataFrame(
        [
            ("tiny", "context", 1, "no press", 0.0, 2**27, 1000, 1200),
            ("tiny", "context", 1, "SnapKVPress", 0.8, 2**27, 2500, 3600),
            ("tiny", "batch", 512, "no press", 0.0, 2**27, 2, 3),
            ("tiny", "batch", 512, "SnapKVPress", 0.8, 2**27, 5, 7),
        ],
        columns=["model", "what", "other", "press", "ratio", "limit", "measured", "predicted"],
    )
    inside = pd.DataFrame(
        {"press": ["KnormPress"] * 3, "decoded": [0, 0, 16], "ratio": [0.5, 2, 0.1]}
    )
    return {
        "throughput": told(),
        "throughput_first": pd.concat([first, slow]),
        "throughput_fits": fits,
        "throughput_kvpress": inside,
    }


def test_findings_are_read_off_the_tables():
    found = {finding.name: finding.text for finding in EXPERIMENT.findings(told_of_all())}
    assert found.pop("speed") == (
        "SnapKV with 80% evicted decodes **1.50** [1.50, 1.50] times as many tokens per second as "
        "the full cache (4,096 tokens, batch 4)."
    )
    expected = {
        "mechanisms": "Patches decode at least **0.99** [0.99, 0.99] times",
        "kvpress": "kvpress decodes at least **0.60** [0.60, 0.60] times",
        "first": "With **1** of 2 presses the first token comes within 1.10",
        "bytes": "at most **1.000** times the bytes",
        "fits": "Within 128 MiB SnapKV with 80% evicted lets **2.50** times",
        "inside": "Inside **1** of 2 presses",
    }
    assert set(found) == set(expected)
    assert all(text in found[name] for name, text in expected.items())


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(1.1, 1.2, "works"), (0.9, 0.95, "costs"), (0.9, 1.5, None)]
)
def test_whether_decoding_is_faster(low, high, verdict):
    table = told(speed_low=low, speed_high=high)
    assert EXPERIMENT.findings({"throughput": table})[0].verdict == verdict


def test_tables_have_a_line_per_row_and_figures_a_dot():
    tables = told_of_all()
    speed, fits = EXPERIMENT.views(tables)
    assert [len(view.rows) for view in (speed, fits)] == [8, 4]
    assert speed.rows[0][2:6] == ["no press", "bare", "9 ms", "100 /s"]
    assert fits.rows[1] == ["longest context, batch 1", "SnapKV 80%", "2,500", "3,600", "2.50"]
    drawn = EXPERIMENT.figures(tables)
    dots = {
        name: [[line.get_xdata()[0] for line in axes.get_lines()[2::2]] for axes in figure.axes]
        for name, figure in drawn.items()
    }
    assert dots == {"throughput": [[1.5, 1.48, 0.9]] * 2, "throughput_first": [[1.1, 3.0]]}


# ---- options and command -------------------------------------------------------------------------


def test_what_is_measured_by_default():
    assert Options().parts == tuple(Part)
    own = Options(model="facts-llama")
    assert own.parts == (Part.SPEED,)
    assert replace(own, limit="8GiB").parts == (Part.SPEED, Part.FITS)
    assert replace(own, part=(Part.FIRST_TOKEN,)).parts == (Part.FIRST_TOKEN,)


def test_sizes_and_devices():
    assert [n_bytes(text) for text in ("8GiB", "1.5 mb", "4096")] == [8 * 2**30, 1_500_000, 4096]
    for wrong in ("", "8 apples", "-1", "0"):
        with pytest.raises(ValueError, match="is no size"):
            n_bytes(wrong)
    assert chosen_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert chosen_device("cuda:1") == "cuda:1"


@pytest.fixture(scope="module")
def cli(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build("gpt_neox").save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    arguments = ["throughput", "--model", str(folder), "--no-kvpress", "--rounds", "1"]
    arguments += ["--tokens", "1", "--context", "128,64"]
    return lambda *more: CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "160"})


def test_command_takes_lists_with_commas(cli, tmp_path):
    more = ["--batch", "1", "--batch", "2", "--ratio", "0.5", "--no-memory"]
    result = cli("--press", "knorm,StreamingLLM", *more, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "throughput.csv")
    assert len(table) == 2 * 2 * (1 + 2 * 2)
    assert set(table["context"]) == {64, 128}
    assert set(table["model"]) == {"tiny"}
    assert {path.name for path in tmp_path.iterdir()} == {"throughput.csv", "throughput.svg"}


def test_every_press_of_the_first_token_part(cli, tmp_path):
    part = ["--part", "first-token", "--press", "snapkv,expectedattention,cam"]
    result = cli(*part, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "throughput_first.csv")
    assert set(table["press"]) == {"no press", "SnapKVPress", "ExpectedAttentionPress", "CAMPress"}
    assert set(table["context"]) == {64}


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
