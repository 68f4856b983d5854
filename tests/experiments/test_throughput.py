"""Speed, memory and what fits: what is slow is found slow, what is large large."""

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from typer import BadParameter

from experiments import UserError
from experiments.framework import timing
from experiments.framework.options import chosen_device, n_bytes
from experiments.questions import overhead, throughput
from experiments.questions.throughput import EXPERIMENT, Options, Part, measuring
from experiments.questions.throughput.measuring import answer, cache_bytes, peak_of, speeds
from experiments.testbed import with_kvpress
from experiments.testbed.timed_models import FULL, Condition, ModelSpec, conditions, scope_of
from experiments.testbed.with_kvpress import rows_with_kvpress
from tests.experiments.tiny import SILENT
from tests.support import build, token_ids

TINY = ModelSpec("tiny", shape=(("num_layers", 2),))  # as the fixture `model` is
SNAP = Condition("SnapKVPress", "hook", 0.5)


# ---- speed ---------------------------------------------------------------------------------------


def test_caches_hold_the_bytes_of_arithmetic(model):
    asked = [*conditions(["SnapKVPress", "ThinKPress"], [0.5]), FULL._replace(ratio=0.5)]
    bare, *others = rows = list(speeds(TINY, asked, [128], [2], tokens=2, rounds=3))
    full = 2 * 2 * 2 * 16 * 128 * 4 * 2  # layers, k and v, heads, channels, ... rows
    assert [row["bytes"] / full for row in rows] == [1, 0.5, 0.5, 0.75, 0.75, 0.5]
    assert [row["bytes"] for row in rows] == [cache_bytes(model, 256, one) for one in asked]
    assert bare["first"] == bare["speed"] == 1
    for row in others:
        assert np.isnan(row["first_low"])  # of three rounds
        assert ("speed_over_hook" in row) == (row["mechanism"] == "patch")
        assert ("speed_over_kept" in row) == (row["press"] != "no press")


def test_a_slow_press_is_found_slow(model, monkeypatch):
    """A prefill takes a second and a step a tenth; one press triples the prefill, halves steps."""
    clock = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: clock[0])
    factors = {FULL: (1, 1), SNAP: (3, 0.5), SNAP._replace(mechanism="patch"): (6, 0.25)}
    now = [(1, 1)]

    def spend(module, args, kwargs):
        first, step = now[0]
        clock[0] += first if kwargs["input_ids"].shape[1] > 1 else 0.1 * step

    @contextmanager
    def scope(condition):
        now[0] = factors[condition]
        yield

    monkeypatch.setattr(measuring, "scope_of", lambda condition, *_: partial(scope, condition))
    monkeypatch.setattr(ModelSpec, "load", lambda _: model)
    with model.register_forward_pre_hook(spend, with_kwargs=True):
        bare, hook, patch = speeds(TINY, list(factors), [64], [4], tokens=2, rounds=6)
    assert bare["first_ms"] == pytest.approx(1000)
    assert bare["tokens_per_s"] == pytest.approx(4 / 0.1)
    assert [hook["first"], hook["speed"]] == pytest.approx([3, 2])
    assert [patch["first"], patch["speed_over_hook"]] == pytest.approx([6, 2])


# ---- memory --------------------------------------------------------------------------------------


def test_peaks_hold_the_cache_at_least():
    deep = ModelSpec("deep", shape=(("num_layers", 8), ("head_dim", 64)))
    long, pruned = (peak_of(deep, one, 2048, 1, 1) for one in (FULL, SNAP._replace(ratio=0.9)))
    cache = cache_bytes(deep.load(), 2048, FULL)
    assert cache < long < 4 * cache  # and nothing of the model, or of the process
    assert pruned < long - 0.25 * cache
    assert peak_of(deep, FULL._replace(ratio=0.9), 2048, 1, 1) < 0.3 * long  # of a short context


def test_a_run_that_fails_says_why():
    with pytest.raises(Exception, match="no folder 'no/such/folder'"):
        peak_of(ModelSpec("none", "no/such/folder"), FULL, 32, 1, 1)


@pytest.mark.gpu
def test_peaks_on_a_gpu():
    spec = TINY._replace(device="cuda")
    short, long = (peak_of(spec, FULL, context, 1, 1) for context in (128, 4096))
    assert cache_bytes(spec.load(), 4096, FULL) < long
    assert short < long


@pytest.mark.parametrize("guess", [1, 90, 6000])
def test_bisection_finds_what_fits(guess):
    for true in (0, 1, 2, 7, 100, 5000):
        tried: list[int] = []
        found = measuring.largest(
            lambda n, true=true, tried=tried: tried.append(n) or n <= true, guess
        )
        assert true - max(1, measuring.PRECISION * true) <= found <= true
        assert len(tried) < 45
    assert measuring.largest(lambda n: True, guess, most=10) == 10


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untouched_cache_is_as_large_as_predicted(family, dtype):
    model = build(family, num_layers=3, dtype=dtype)
    _, _, n_bytes = answer(model, token_ids(1, 37), scope_of(FULL, model, 37), 1)
    assert n_bytes == cache_bytes(model, 37, FULL)


def test_nothing_is_predicted_of_sliding_windows():
    assert np.isnan(cache_bytes(build("gemma2", attn_implementation="eager"), 37, FULL))


def test_what_fits_is_found_by_measuring(model, monkeypatch):
    """Presses that take 10 bytes a token, beside the weights."""
    with pytest.raises(UserError, match=r"weights .*alone"):
        throughput.measure_fits(Options(limit=1024), SILENT)
    monkeypatch.setattr(measuring, "peak_of", lambda spec, press, n, batch, tokens: 10 * n * batch)
    monkeypatch.setattr(throughput, "DEEP", TINY)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    options = Options(limit=weights + 10 * 3000, batch=(4, 2), press=("Knorm",))
    rows = throughput.measure_fits(options, SILENT)
    assert rows["press"].tolist() == ["no press", "KnormPress"]
    assert set(rows["batch"]) == {2}
    assert rows["measured"].between(1500 * (1 - 2 * measuring.PRECISION), 1500).all()
    monkeypatch.setattr(measuring, "peak_of", lambda *_, **__: None)  # killed for too much memory
    assert set(throughput.measure_fits(options, SILENT)["measured"]) == {0}


# ---- kvpress -------------------------------------------------------------------------------------


def test_kvpress_is_asked_in_its_own_process(tmp_path):
    """A process that prints what it was asked stands for the environment with kvpress."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nsed 's/^/[{\"asked\": /; s/$/}]/'\n")
    fake.chmod(0o755)
    (heard,) = rows_with_kvpress(fake, "module", spec=TINY, rounds=3)["asked"]
    assert heard == json.loads(json.dumps({"spec": TINY, "rounds": 3}))
    fake.write_text("#!/bin/sh\necho no luck >&2; exit 3\n")
    with pytest.raises(UserError, match=r"no luck; .*--no-kvpress"):
        rows_with_kvpress(fake, "module")


@pytest.fixture
def output_of(monkeypatch):
    """What the interpreter with kvpress prints; how it makes that is tested by the oracle."""
    monkeypatch.setattr(with_kvpress, "python_with_kvpress", lambda: "python")
    monkeypatch.setattr(with_kvpress, "output_of", printing := Mock())
    return printing


SPEED = Options(part=(Part.SPEED,), context=(128,), batch=(1,), memory=False, compiled=False)


@pytest.mark.parametrize(
    ("experiment", "options"),
    [(throughput, SPEED), (overhead, overhead.Options(layers=(2,), context=64, compiled=False))],
)
def test_rows_of_kvpress_join_the_others(experiment, options, output_of):
    output_of.return_value = '[{"mechanism": "kvpress"}]'
    few = replace(options, press=("Knorm",), rounds=2)
    (table,) = experiment.EXPERIMENT.measure(few, SILENT).values()
    assert output_of.call_args.args == ("python", with_kvpress.__name__, experiment.__name__)
    assert json.loads(output_of.call_args.kwargs["given"])["rounds"] == 2
    assert {"hook", "patch"} < set(table["mechanism"])
    assert table["mechanism"].tolist()[-1] == "kvpress"


def test_time_inside_presses_is_that_of_the_oracle(output_of):
    output_of.return_value = "press,ratio\nKnormPress,0.5\n"
    asked = Options(part=(Part.KVPRESS,))
    assert EXPERIMENT.measure(asked, SILENT)["throughput_kvpress"]["ratio"].tolist() == [0.5]
    output_of.assert_called_once_with("python", "tests.oracle.timing", *throughput.INSIDE)
    output_of.side_effect = UserError("no luck")
    assert EXPERIMENT.measure(asked, SILENT) == {}
    assert set(throughput.INSIDE) <= set(with_kvpress.import_module("hooks_impl").PRESSES)


# ---- what is told --------------------------------------------------------------------------------


def told(**changed):
    """A table of one press at two contexts, hook, patch and kvpress."""
    rates = {"bare": 100.0, "hook": 150.0, "patch": 148.0, "kvpress": 90.0}
    rows = [(n, mechanism, rate) for n in (1024, 4096) for mechanism, rate in rates.items()]
    table = pd.DataFrame(rows, columns=["context", "mechanism", "tokens_per_s"])
    bare, rate = table["mechanism"] == "bare", table["tokens_per_s"]
    table["press"] = np.where(bare, "no press", "SnapKVPress")
    table["ratio"] = np.where(bare, 0.0, 0.8)
    for name, values in (("first", 1.1), ("speed", rate / 100), ("speed_over_hook", rate / 150)):
        table[[name, f"{name}_low", f"{name}_high"]] = np.c_[[values + 0 * rate] * 3].T
    held = table["context"] * 1000 * (1 - table["ratio"])
    table = table.assign(model="tiny", batch=4, first_ms=9.0, peak=5e6, bytes=held, predicted=held)
    return table.assign(run="eager", cache="dynamic").assign(**changed)


def test_findings_are_read_off_the_tables():
    first = told().query("mechanism in ['bare', 'hook'] and context == 4096")
    slow = first[first["press"] != "no press"].assign(press="KVzipPress", first=3.0)
    fits = first.assign(measured=[1000, 2500], limit=2**27).drop(columns="context")
    presses = ["KnormPress", "SnapKVPress", "DecodingPress", "AdaKVPress"]
    inside = {"press": presses, "decoded": [0, 0, 4, 16], "ratio": [0.5, 2, 0.3, 0.1]}
    tables = {
        "throughput": pd.concat([told(), told(bytes=1e9, speed=9.0)]),  # one that evicts nothing
        "throughput_first": pd.concat([first, slow]),
        "throughput_fits": fits,
        "throughput_kvpress": pd.DataFrame(inside),
    }
    found = {finding.name: finding for finding in EXPERIMENT.findings(tables)}
    assert found["speed"].interval == (1.5, 1.5)
    said = {name: finding.number for name, finding in found.items()}
    assert said == {"speed": 1.5, "kvpress": 0.6, "first": 1, "bytes": 1, "fits": 2.5, "inside": 1}


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(1.1, 1.2, "works"), (0.9, 0.95, "costs"), (0.9, 1.5, None)]
)
def test_whether_decoding_is_faster(low, high, verdict):
    table = told(speed_low=low, speed_high=high)
    compiled = table.assign(run="compiled", cache="static", speed=9.0)
    found = EXPERIMENT.findings({"throughput": pd.concat([compiled, table])})[:2]
    assert [(one.verdict, one.number) for one in found] == [(verdict, 1.5), (verdict, 9)]


# ---- options and command -------------------------------------------------------------------------


def test_what_is_measured_by_default():
    assert Options().parts == tuple(Part)
    own = Options(model="facts-llama")
    assert own.parts == (Part.SPEED,)
    assert replace(own, limit=2**33).parts == (Part.SPEED, Part.FITS)
    assert replace(own, part=(Part.FIRST_TOKEN,)).parts == (Part.FIRST_TOKEN,)


def test_sizes_and_devices():
    assert [n_bytes(text) for text in ("8GiB", "1.5 mb", "4096")] == [8 * 2**30, 1_500_000, 4096]
    for wrong in ("", "8 apples", "-1", "0"):
        with pytest.raises(BadParameter, match="is no size"):
            n_bytes(wrong)
    assert chosen_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert chosen_device("cuda:1") == "cuda:1"
