"""Sweeps: what is asked for, what is answered, and that nothing is lost, doubled or mixed up."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
import torch
import typer
import yaml
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.answers import cells, setup, store
from experiments.answers import sweep as sweeps
from experiments.answers.cells import NO_PRESS, Cell, plan, press_text, run_cell
from experiments.answers.datasets import load
from experiments.answers.engines import Failure, on_ray, serial
from experiments.answers.presses import make_press, takes
from experiments.answers.settings import Settings, settings_from
from experiments.answers.setup import model_fingerprint, setup_of
from experiments.answers.store import Store
from experiments.answers.sweep import sweep
from experiments.framework.manifest import write_at_once
from experiments.framework.results import read_table, write_table
from experiments.loading import load_model
from experiments.questions import evaluate
from press_core import HyperparameterError, Tokens

SMALL = Settings(
    dataset=("facts/single@48", "facts/multiquery@48"),
    press=("SnapKVPress(window_size=8)",),
    ratio=(0.0, 0.5),
    samples=8,
    threads=1,
)
SETUP = {"model": "facts-llama", "seed": 0, "versions": {"torch": "1"}, "made_with": {"date": "x"}}
EXAMPLES = sorted(Path(sweeps.__file__).parent.glob("examples/*.yaml"))


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_sweep(settings, folder, **ray):
    """Run a sweep in `folder`; returns results, failures and what was printed."""
    printed = StringIO()
    kept = Store(folder, SETUP)
    return *sweep(settings, kept, Console(file=printed, width=200), **ray), printed.getvalue()


def without_time(results):
    return results.drop(columns="seconds")


# ---- presses as text ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SnapKVPress", lambda p: p.SnapKVPress(0.25)),
        ("SnapKVPress()", lambda p: p.SnapKVPress(0.25)),
        ("SnapKVPress(0.9, window_size=8)", lambda p: p.SnapKVPress(0.25, window_size=8)),
        (
            "AdaKVPress(SnapKVPress(), alpha_safeguard=0.1)",
            lambda p: p.AdaKVPress(p.SnapKVPress(0.25), alpha_safeguard=0.1),
        ),
        ("RandomPress", lambda p: p.RandomPress(0.25, seed=7)),
        ("RandomPress(seed=3)", lambda p: p.RandomPress(0.25, seed=3)),
        (
            "ComposedPress([KnormPress(ratio), TOVAPress(ratio)])",
            lambda p: p.ComposedPress([p.KnormPress(0.25), p.TOVAPress(0.25)]),
        ),
        (
            "DuoAttentionPress(head_compression_ratio=ratio)",
            lambda p: p.DuoAttentionPress(head_compression_ratio=0.25),
        ),
        ("PyramidKVPress(beta=10)", lambda p: p.PyramidKVPress(0.25, beta=10)),
    ],
)
def test_a_press_is_what_its_text_says(text, expected):
    for mechanism, package in (("hook", hooks_impl), ("patch", patch_impl)):
        press = make_press(text, mechanism, 0.25, 7)
        assert press == expected(package)
        assert make_press(repr(press), mechanism, None, 0) == press


def test_presses_with_a_size_of_their_own():
    text = "DecodingPress(KnormPress(), target_size=64)"
    assert not takes(text, "hook", "ratio")
    assert takes("SnapKVPress", "hook", "ratio")
    assert takes("DuoAttentionPress(head_compression_ratio=ratio)", "patch", "ratio")
    with pytest.raises(HyperparameterError, match="cannot be told a compression ratio"):
        make_press(text, "hook", 0.5, 0)
    press = make_press(text, "hook", None, 0)
    assert press == hooks_impl.DecodingPress(hooks_impl.KnormPress(), target_size=64)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SnapKVPress", lambda p: p.SnapKVPress(Tokens(24))),
        ("SnapKVPress(0.9, window_size=8)", lambda p: p.SnapKVPress(Tokens(24), window_size=8)),
        ("AdaKVPress(SnapKVPress())", lambda p: p.AdaKVPress(p.SnapKVPress(Tokens(24)))),
        (
            "DecodingPress(KnormPress(), target_size=64)",
            lambda p: p.DecodingPress(p.KnormPress(), target_size=24),
        ),
        (
            "ComposedPress([KnormPress(Tokens(96)), TOVAPress(Tokens(budget))])",
            lambda p: p.ComposedPress([p.KnormPress(Tokens(96)), p.TOVAPress(Tokens(24))]),
        ),
        ("SimLayerKVPress(n_recent=budget)", lambda p: p.SimLayerKVPress(n_recent=24)),
    ],
)
def test_a_press_is_told_a_number_of_tokens(text, expected):
    for mechanism, package in (("hook", hooks_impl), ("patch", patch_impl)):
        assert takes(text, mechanism, "budget")
        press = make_press(text, mechanism, Tokens(24), 7)
        assert press == expected(package)
        assert make_press(repr(press), mechanism, None, 0) == press


def test_numbers_of_tokens_stand_in_a_text_wherever_shares_do():
    made = make_press("PerLayerCompressionPress(KnormPress(), [Tokens(8), 0.5])", "hook", None, 0)
    assert made.compression_ratios == [Tokens(8), 0.5]
    assert make_press("KnormPress(Tokens(8, 0.5))", "hook", None, 0).amount == Tokens(8, 0.5)


def test_presses_that_take_no_number_of_tokens():
    for text in ("DuoAttentionPress(head_compression_ratio=ratio)", "ThinKPress()"):
        assert not takes(text, "hook", "budget")
    with pytest.raises(HyperparameterError, match="cannot be told a compression ratio"):
        make_press("ThinKPress()", "hook", Tokens(8), 0)


@pytest.mark.parametrize(
    ("text", "amount", "words"),
    [
        ("SnapKVPress(ratio)", Tokens(8), "says `ratio`, and no ratio is given"),
        ("SimLayerKVPress(n_recent=budget)", 0.5, "says `budget`, and no budget is given"),
        ("SimLayerKVPress(n_recent=budget)", None, "says `budget`, and no budget is given"),
        ("SnapKVPress(ratio, window_size=budget)", 0.5, "says `budget`, and no budget is given"),
        ("SnapKVPress(Tokens())", None, "cannot make 'SnapKVPress"),
        ("SnapKVPress(Tokens(size=3))", None, "Tokens has no size; its fields are n, progress"),
        ("Tokens(64)", None, "'Tokens.64.' is no press"),
    ],
)
def test_amounts_that_do_not_fit_a_text_are_refused_in_words(text, amount, words):
    with pytest.raises(UserError, match=words):
        make_press(text, "hook", amount, 0)


@pytest.mark.parametrize("tokens", ["0", "-3", "1.5", "'many'"])
def test_numbers_of_tokens_out_of_range(tokens):
    with pytest.raises(HyperparameterError, match="must be a number of tokens, 1 or more"):
        make_press(f"SnapKVPress(Tokens({tokens}))", "hook", None, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NoPress", "there is no press 'NoPress'.*there are AdaKVPress, BlockPress"),
        ("SnapKVPress(size=3)", "SnapKVPress has no size; its fields are compression_ratio, wind"),
        ("SnapKVPress(", "cannot read the press"),
        ("AdaKVPress()", "cannot make 'AdaKVPress.*press"),
        ("SnapKVPress(__import__('os'))", "there is no press '__import__'"),
        ("SnapKVPress(x.y)", "x.y is not allowed"),
        ("SnapKVPress(open('x').read())", "is not allowed"),
        ("3", "'3' is no press"),
        ("KnormPress(1, 2, 3)", "KnormPress has no 3 fields"),
        ("KnormPress(compression_ratio=ratio)", "says `ratio`, and no ratio is given"),
        ("(" * 9999, "cannot read the press"),
        ("-" * 9999 + "1", "cannot read the press|is not allowed"),
        ("KnormPress(0.5)\0", "cannot read the press"),
        ("KnormPress({[]: 1})", "is not allowed in the press"),
        ("KnormPress(**{'compression_ratio': 0.5})", "is not allowed in the press"),
        ("KnormPress(*[0.5])", "is not allowed in the press"),
    ],
)
def test_what_is_no_press_is_refused_in_words(text, words):
    with pytest.raises(UserError, match=words):
        make_press(text, "hook", None, 0)


# ---- settings and cells ------------------------------------------------------------------------


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("press: [KnormPress, TOVAPress]\nratio: 0.25\nsamples: 3\nthreads: null\n")
    settings = settings_from(file, {"samples": 5, "ratio": None, "dataset": ["facts/single"]})
    assert settings == Settings(
        press=("KnormPress", "TOVAPress"), ratio=(0.25,), samples=5, dataset=("facts/single",)
    )
    file.write_text("generation: {do_sample: true, temperature: 0.5}")
    expected = {"do_sample": True, "temperature": 0.5}
    assert settings_from(file, {}).generation == expected
    assert settings_from(None, {}) == Settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("presses: [KnormPress]", "has presses, which is no setting; there are model, press"),
        ("samples: many", "samples is 'many'; input should be a valid integer"),
        ("samples: true", "samples is True; input should be a valid integer"),
        ("samples: 0", "samples is 0; input should be greater than or equal to 1"),
        ("ratio: [0.5, high]", "ratio is 'high'; input should be a valid number"),
        ("ratio: 1", "ratio is 1; input should be less than 1"),
        ("ratio: .nan", "ratio is nan; input should be less than 1"),
        ("press: []", "press is .*; .*at least 1 item"),
        ("mechanism: hooks", "mechanism is 'hooks'; input should be 'hook' or 'patch'"),
        ("dtype: int8", "dtype is 'int8'"),
        ("compress_questions: 1", "compress_questions is 1; input should be a valid boolean"),
        ("generation: greedy", "generation is 'greedy'"),
        ("generation: {top: 3}", "top is not allowed; there are do_sample"),
        ("model_kwargs: {device_map: auto}", "device_map is not allowed; there are revision"),
        ("budget: 0", "budget is 0; input should be greater than or equal to 1"),
        ("budget: 0.5", "budget is 0.5; input should be a valid integer"),
        ("budget: [64, all]", "budget is 'all'; input should be a valid integer"),
        ("fraction: 0", "fraction is 0; input should be greater than 0"),
        ("needle_depth: 50", "needle_depth is 50; input should be less than or equal to 1"),
        ("- a\n- b", "must be a YAML mapping"),
        ("a: [", "is not YAML"),
        ("a: 2024-99-99", "is not YAML"),
        ("[" * 2000, "is not YAML"),
    ],
)
def test_settings_that_cannot_be_are_named(tmp_path, text, words):
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        settings_from(tmp_path / "sweep.yaml", {})


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        settings_from(tmp_path / "sweep.yaml", {})


@pytest.mark.parametrize(
    "text",
    [
        "generation: {custom_generate: DIR}",
        "generation: {custom_generate: DIR, trust_remote_code: true}",
        "generation: {trust_remote_code: true}",
        "model_kwargs: {trust_remote_code: true}",
        "custom_generate: DIR",
        "trust_remote_code: true",
    ],
)
def test_a_file_runs_no_code(tmp_path, text):
    config = own_generate(tmp_path, text)
    with pytest.raises(UserError, match=r"not allowed|give it as a flag, --"):
        settings_from(config, {})


def own_generate(folder, text):
    """A YAML file, and beside it a folder whose `generate` leaves a mark."""
    code = folder / "own" / "custom_generate"
    code.mkdir(parents=True)
    (code / "generate.py").write_text(
        "import pathlib\n"
        "def generate(model, **arguments):\n"
        "    pathlib.Path(__file__).with_name('ran').touch()\n"
        "    return model.generate(**arguments)\n"
    )
    (folder / "sweep.yaml").write_text(text.replace("DIR", str(folder / "own")))
    return folder / "sweep.yaml"


def test_code_is_run_where_a_flag_says_so(tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    config = own_generate(tmp_path, "ratio: 0")
    result = call(
        "--config", config, "--custom-generate", tmp_path / "own", "--output", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    assert list(tmp_path.rglob("ran"))


def test_presses_and_settings_read_anything_without_a_traceback(tmp_path):
    """Whatever a file says is settings that can be planned, or is refused in words."""
    file = tmp_path / "sweep.yaml"

    @given(yaml_texts())
    @drawn(deadline=None)
    def read(text):
        file.write_bytes(text)
        with contextlib.suppress(UserError, HyperparameterError):
            plan(settings_from(file, {}))

    read()
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


_ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.dates()
)
_PRESS_WORDS = ("SnapKVPress", "AdaKVPress", "ratio", "compression_ratio", "window_size", "press")


@st.composite
def press_texts(draw):
    signs = "(", ")", "[", "]", "{", "}", "=", ":", ",", "0.5", "-", "lambda ", ".", "'", "\\"
    words = st.sampled_from([*_PRESS_WORDS, *signs])
    return draw(st.one_of(st.text(max_size=30), st.lists(words, max_size=14).map("".join)))


def yaml_texts():
    """YAML with the names of settings and values of all kinds, and bytes that are none."""
    names = [field.name for field in fields(Settings)]
    values = st.recursive(
        st.one_of(_ATOMS, press_texts()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)
        ),
        max_leaves=6,
    )
    wild = st.dictionaries(st.one_of(st.sampled_from(names), _ATOMS), values, max_size=4)
    return st.one_of(
        st.binary(max_size=40), wild.map(lambda found: yaml.safe_dump(found).encode("utf-8"))
    )


@given(press_texts(), st.sampled_from([None, 0.5]))
@drawn(deadline=None)
def test_press_texts_make_a_press_or_an_error_in_words(text, ratio):
    with contextlib.suppress(UserError, HyperparameterError):
        make_press(text, "hook", ratio, 0)


def test_cells_are_the_grid_each_once():
    decoding = "DecodingPress(KnormPress())"
    settings = Settings(
        dataset=("facts", "facts/single"),
        press=("SnapKVPress", decoding, "SnapKVPress"),
        ratio=(0.0, 0.5, 0.8),
    )
    cells = plan(settings)
    assert len(set(cells)) == len({cell.key for cell in cells}) == len(cells) == 3 * (1 + 4 + 2)
    single = [cell[1:] for cell in cells if cell.dataset == "facts/single@512"]
    assert single == [
        (NO_PRESS, 0.0, "bare", None),
        ("SnapKVPress", 0.5, "hook", None),
        ("SnapKVPress", 0.8, "hook", None),
        ("SnapKVPress", 0.5, "patch", None),
        ("SnapKVPress", 0.8, "patch", None),
        (decoding, None, "hook", None),
        (decoding, None, "patch", None),
    ]


def test_cells_of_budgets():
    decoding, duo = "DecodingPress(KnormPress())", "DuoAttentionPress(head_compression_ratio=ratio)"
    settings = Settings(
        dataset=("facts/single",),
        press=("SnapKVPress", decoding, duo, "ThinKPress"),
        ratio=(0.5,),
        budget=(64, 32),
        mechanism=("hook",),
    )
    cells = plan(settings)
    assert len({cell.key for cell in cells}) == len(cells)
    assert [(cell.press, cell.ratio, cell.budget) for cell in cells] == [
        ("SnapKVPress", 0.5, None),
        ("SnapKVPress", None, 64),
        ("SnapKVPress", None, 32),
        (decoding, None, 64),
        (decoding, None, 32),
        (duo, 0.5, None),
        ("ThinKPress", None, None),
    ]
    made = [cell.make(0) for cell in cells[1:4]]
    assert [made[0].amount, made[1].amount, made[2].target_size] == [Tokens(64), Tokens(32), 64]
    alone = replace(settings, ratio=(0.0,), press=(duo,))
    with pytest.raises(UserError, match=r"takes a ratio, and no number of tokens; give a ratio"):
        plan(alone)


def test_a_budget_stands_in_place_of_ratios_that_nobody_gave(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("budget: 64")
    assert (settings_from(file, {}).ratio, settings_from(file, {}).budget) == ((0.0,), (64,))
    assert settings_from(file, {"ratio": [0.5]}).ratio == (0.5,)
    file.write_text("budget: []")
    assert settings_from(file, {}) == Settings()


def test_mistakes_show_before_anything_is_run():
    with pytest.raises(UserError, match="there is no press"):
        plan(replace(SMALL, press=("KnormPress", "nosuch")))
    with pytest.raises(UserError, match="there is no dataset"):
        plan(replace(SMALL, dataset=("nosuch",)))
    with pytest.raises(HyperparameterError, match="window_size"):
        plan(replace(SMALL, press=("SnapKVPress(window_size=0)",)))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_can_be_planned(path):
    settings = settings_from(path, {})
    assert plan(settings)
    if path.stem == "study":
        assert settings == Settings()


def test_a_cell_scores_what_the_model_answers():
    """Against the model called by hand, one context and one question at a time."""
    settings, cell = SMALL, Cell("facts/multiquery@48", "SnapKVPress(window_size=8)", 0.5, "patch")
    model, tokenizer = load_model("facts-llama")
    rows, evicted = run_cell(settings, cell)
    assert evicted == pytest.approx(1 - int(49 * 0.5) / 49)
    samples = load(cell.dataset, 8, 0, tokenizer, "facts-llama")
    press = patch_impl.SnapKVPress(0.5, window_size=8)
    for row, sample in zip(rows, samples, strict=True):
        context = tokenizer(sample.context, return_tensors="pt").input_ids
        question = tokenizer(sample.question, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad(), press(model):
            cache = model(context, use_cache=True).past_key_values
            logits = model(question.input_ids, past_key_values=cache).logits
        assert row["prediction"] == tokenizer.decode(logits[0, -1].argmax())
        assert row["score"] == float(row["prediction"] == sample.answers[0])
        assert (row["question"], row["answers"]) == (sample.question, list(sample.answers))


@pytest.mark.parametrize("press", ["SnapKVPress(window_size=8)", "AdaKVPress(KnormPress())"])
def test_a_cell_keeps_its_budget(press):
    """Of contexts of 49 tokens, and of the answers of a press that acts while decoding."""
    results = [
        run_cell(SMALL, Cell("facts/multiquery@48", press, None, mechanism, 12))
        for mechanism in ("hook", "patch")
    ]
    assert results[0].evicted == pytest.approx(1 - 12 / 49)
    assert results[0] == results[1]


def test_a_cell_is_the_same_whatever_ran_before():
    sampled = {"do_sample": True, "eos_token_id": [2, 3]}
    settings = replace(SMALL, press=("RandomPress",), generation=sampled)
    cell = Cell("facts/single@48", "RandomPress", 0.5, "hook")
    first = run_cell(settings, cell)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    run_cell(settings, Cell("facts/multiquery@48", "RandomPress", 0.5, "patch"))
    assert run_cell(settings, cell) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert run_cell(settings, cell._replace(mechanism="patch")) == first
    assert run_cell(replace(settings, seed=1), cell) != first


def test_arguments_for_the_model_reach_it():
    settings = replace(SMALL, model_kwargs={"max_position_embeddings": 20})
    with pytest.raises(UserError, match="more than the 20 positions"):
        run_cell(settings, Cell("facts/single@48", NO_PRESS, 0.0, "bare"))


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_model_is_trusted_by_its_flag_alone(monkeypatch, tmp_path, trusted):
    seen = []

    def load(name, **given):
        seen.append(given.get("trust_remote_code", False))
        return load_model("facts-llama")

    monkeypatch.setattr(cells, "load_model", load)
    flag = ["--trust-remote-code"] if trusted else []
    result = call("--ratio", "0", "--seed", 40 + trusted, *flag, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert seen == [trusted]


# ---- sweeps ------------------------------------------------------------------------------------


def test_a_sweep_keeps_all_it_takes_to_repeat_it(tmp_path):
    results, failures, _ = run_sweep(SMALL, tmp_path)
    assert failures == {}
    assert len(results) == len(plan(SMALL)) == 6
    found = pd.read_csv(tmp_path / "predictions.csv", dtype=str)
    assert len(found) == 6 * 8
    one = found[(found["dataset"] == "facts/single@48") & (found["mechanism"] == "hook")]
    assert set(one["press_text"]) == {
        "SnapKVPress(compression_ratio=0.5, window_size=8, kernel_size=5)"
    }
    scores = found.assign(score=found["score"].astype(float))
    mean = scores.groupby(["dataset", "mechanism"])["score"].mean()
    for row in results.itertuples():
        assert mean[row.dataset, row.mechanism] == row.score
        assert not row.low > row.score
        assert not row.high < row.score  # there may be no interval
    by_mechanism = [set(found[found["mechanism"] == m]["prediction"]) for m in ("hook", "patch")]
    assert by_mechanism[0] == by_mechanism[1]


def test_an_interrupted_sweep_continues(tmp_path, monkeypatch):
    whole = run_sweep(SMALL, tmp_path / "whole")[0]
    ran = []

    def interrupted(settings, cell):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(cell)
        return run_cell(settings, cell)

    monkeypatch.setattr(sweeps, "run_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(SMALL, tmp_path / "cut")
    monkeypatch.setattr(sweeps, "run_cell", lambda s, c: ran.append(c) or run_cell(s, c))
    continued, _, printed = run_sweep(SMALL, tmp_path / "cut")
    assert sorted(ran) == sorted(plan(SMALL))  # each once
    assert "2 of 6 cells are finished already" in printed
    pd.testing.assert_frame_equal(without_time(continued), without_time(whole))
    again, _, _ = run_sweep(SMALL, tmp_path / "cut")
    assert len(ran) == 6
    pd.testing.assert_frame_equal(again, continued)


def test_a_sweep_of_budgets_is_told_from_one_of_ratios(tmp_path, monkeypatch):
    settings = replace(SMALL, dataset=("facts/single@48",), ratio=(0.0, 0.5))
    run_sweep(settings, tmp_path)
    ran = []
    monkeypatch.setattr(sweeps, "run_cell", lambda s, c: ran.append(c) or run_cell(s, c))
    results, failures, printed = run_sweep(replace(settings, budget=(24, 12)), tmp_path)
    assert failures == {}
    assert [(cell.ratio, cell.budget) for cell in ran] == [(None, 24), (None, 12)] * 2
    assert "SnapKVPress(window_size=8)  24 tokens  hook: " in printed
    table = pd.read_csv(tmp_path / "results.csv", dtype={"budget": str})
    told = table[["ratio", "budget", "evicted"]]
    by_hook = told[table["mechanism"] == "hook"].round(4).astype(object).where(told.notna(), None)
    assert by_hook.to_numpy().tolist() == [
        [0.5, None, round(1 - 24 / 49, 4)],
        [None, "24", round(1 - 24 / 49, 4)],
        [None, "12", round(1 - 12 / 49, 4)],
    ]
    found = pd.read_csv(tmp_path / "predictions.csv", dtype={"budget": str})
    assert set(found["budget"].dropna()) == {"24", "12"}
    # As many tokens by share and by number: the same answers.
    texts = found[found["mechanism"] == "hook"].groupby(["ratio", "budget"], dropna=False)
    same = [list(rows["prediction"]) for _, rows in texts]
    assert same[0] == same[2]
    again = run_sweep(replace(settings, budget=(24, 12)), tmp_path)[0]
    pd.testing.assert_frame_equal(again, results)
    assert len(ran) == 4


def damage(path, how):
    """Take a cell, or the tables, away, or leave half of a cell, as what goes wrong does."""
    if how == "killed while writing":
        (path / "cells" / ".one.json.00.part").write_text('{"key": ')
    elif how == "cell gone":
        next((path / "cells").glob("*.json")).unlink()
    elif how == "tables cut":
        (path / "results.csv").write_bytes((path / "results.csv").read_bytes()[:30])
        (path / "predictions.csv").write_text("")
    elif how == "tables gone":
        for name in ("results.csv", "predictions.csv"):
            (path / name).unlink()


@pytest.mark.parametrize(
    ("how", "n_again"),
    [("killed while writing", 0), ("cell gone", 1), ("tables cut", 0), ("tables gone", 0)],
)
def test_what_is_missing_is_run_again(tmp_path, monkeypatch, how, n_again):
    settings = replace(SMALL, dataset=("facts/single@48",))
    before = run_sweep(settings, tmp_path)[0]
    damage(tmp_path, how)
    ran = []
    monkeypatch.setattr(sweeps, "run_cell", lambda s, c: ran.append(c) or run_cell(s, c))
    after, _, _ = run_sweep(settings, tmp_path)
    assert len(ran) == n_again
    pd.testing.assert_frame_equal(without_time(after), without_time(before))
    assert len(pd.read_csv(tmp_path / "predictions.csv")) == 3 * 8
    assert json.loads((tmp_path / "setup.json").read_text()) == SETUP


@given(st.integers(0, 600), st.binary(min_size=1, max_size=200), st.booleans())
@drawn(deadline=None)
def test_a_damaged_cell_is_refused_in_words(swept, tmp_path_factory, place, content, cut):
    """Whatever its bytes say: results, or one error, and nothing is written anywhere else."""
    outer = tmp_path_factory.mktemp("damaged")
    shutil.copytree(swept, outer / "sweep")
    (cell,) = (outer / "sweep" / "cells").iterdir()
    whole = cell.read_bytes()
    start = place * len(whole) // 600
    cell.write_bytes(whole[:start] + content + (b"" if cut else whole[start + len(content) :]))
    with contextlib.suppress(UserError):
        opened = Store(outer / "sweep", SETUP)
        opened.finished()
        opened.write_tables()
    assert [path.name for path in outer.iterdir()] == ["sweep"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    run_sweep(replace(SMALL, dataset=("facts/single@48",), ratio=(0.0,)), folder)
    return folder


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null", "3", '"setup"'])
def test_a_set_up_that_says_nothing_is_refused(tmp_path, swept, content):
    shutil.copytree(swept, tmp_path / "sweep")
    (tmp_path / "sweep" / "setup.json").write_text(content)
    with pytest.raises(UserError, match=r"no file of a sweep|another set-up"):
        Store(tmp_path / "sweep", SETUP)


def test_a_second_sweep_in_a_folder_is_told_of_the_first(tmp_path, monkeypatch):
    """Both have found the cell missing; the one that is finished first has written it."""

    def overtaken(settings, cell):
        result = run_cell(settings, cell)
        about = {"evicted": 0.0, "press_text": "", "seconds": 0.0}
        Store(tmp_path, SETUP).save(cell, result.rows, about)
        return result

    monkeypatch.setattr(sweeps, "run_cell", overtaken)
    with pytest.raises(UserError, match=f"another sweep is writing to {tmp_path}"):
        run_sweep(SMALL, tmp_path)
    assert len(Store(tmp_path, SETUP).results()) == 1


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_files_get_the_permissions_of_the_umask(tmp_path, umask):
    former = os.umask(umask)
    try:
        Store(tmp_path, SETUP).write_tables()
    finally:
        os.umask(former)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("results.csv", "predictions.csv", "setup.json"), 0o666 & ~umask)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    settings = replace(SMALL, dataset=("facts/single@48",))
    expected = run_sweep(settings, tmp_path / "whole")[0]

    def full(path, content):
        if path.parent.name == "cells" and any(path.parent.glob("*.json")):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_at_once(path, content)

    monkeypatch.setattr(store, "write_at_once", full)
    with pytest.raises(UserError, match=r"No space left.*the same command again"):
        run_sweep(settings, tmp_path / "full")
    monkeypatch.setattr(store, "write_at_once", write_at_once)
    ran = []
    monkeypatch.setattr(sweeps, "run_cell", lambda s, c: ran.append(c) or run_cell(s, c))
    results = run_sweep(settings, tmp_path / "full")[0]
    assert len(ran) == 2
    pd.testing.assert_frame_equal(without_time(results), without_time(expected))


@pytest.mark.parametrize("name", ["results.csv", "predictions.csv", "setup.json", "cells"])
def test_files_of_others_are_not_touched(tmp_path, name):
    for content in (b"mine", b""):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="another --output"):
            Store(tmp_path, SETUP)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: content}


def test_a_link_leads_nowhere(tmp_path):
    outside = tmp_path / "outside"
    for name in ("results.csv", "cells", "setup.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).symlink_to(outside)
        with pytest.raises(UserError, match="another --output"):
            Store(folder, SETUP)
    assert not outside.exists()


def test_an_output_that_cannot_be_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "run_cell", lambda *_: pytest.fail("worked first"))
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "inside"):
        result = call("--output", output)
        assert isinstance(result.exception, UserError), result.output
    assert (tmp_path / "file").read_text() == "mine"


def test_a_cell_that_fails_takes_nothing_from_the_others(tmp_path):
    wrong = "PerLayerCompressionPress(SnapKVPress(window_size=8), [ratio])"
    settings = replace(SMALL, dataset=("facts/single@48",), press=(wrong, "KnormPress"))
    results, failures, printed = run_sweep(settings, tmp_path)
    assert len(results) == 3
    assert {cell.press for cell in failures} == {wrong}
    assert all("4" in reason for reason in failures.values())  # layers of the model
    assert printed.count("HyperparameterError") == 2
    assert "4 cells" not in printed


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1), ("versions", {"torch": "2"}), ("samples", 3)]
)
def test_set_ups_are_not_mixed(tmp_path, name, value):
    Store(tmp_path, SETUP)
    Store(tmp_path, SETUP | {"made_with": {"date": "later"}})
    with pytest.raises(UserError, match=f"another set-up.*{name} was .*give another --output"):
        Store(tmp_path, SETUP | {name: value})


ROWS = [
    {"sample": i, "context": c, "question": "q", "answers": ["1"], "prediction": p}
    | {"metric": "f1", "score": s}
    for i, c, p, s in [(0, "12e4", "007", 1.0), (1, "3456", ' a,\n"b" ', 0.1), (2, "0", "", 0.0)]
]


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_predictions_come_back_as_they_were(tmp_path, file_format):
    if file_format == "parquet":
        pytest.importorskip("pyarrow", reason="the extra [evaluate] is not installed")
    kept, cell = Store(tmp_path, SETUP, file_format), Cell("d", "KnormPress", None, "hook")
    assert not kept.finished()
    kept.save(cell, ROWS, {"press_text": "p", "seconds": 1})
    assert kept.finished() == {cell.key}
    found = kept.predictions()
    for name in ("sample", "context", "prediction", "score"):
        assert list(found[name]) == [row[name] for row in ROWS]
    assert json.loads(found["answers"][0]) == ["1"]
    kept.write_tables([cell])
    assert {path.name for path in tmp_path.glob(f"*.{file_format}")} == {
        f"results.{file_format}",
        f"predictions.{file_format}",
    }


def test_parquet_needs_its_library(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"hook-or-patch\[evaluate\]"):
        Store(tmp_path, SETUP, "parquet")


# ---- what made the results ---------------------------------------------------------------------


def test_the_set_up_says_what_made_the_results(tmp_path):
    made = setup_of(SMALL)
    assert made["versions"]["torch"] == torch.__version__
    assert made["threads"] == 1
    assert {"date", "commit", "machine"} <= set(made["made_with"])
    assert not {"press", "ratio", "mechanism", "dataset"} & set(made)
    Store(tmp_path, made)
    Store(tmp_path, setup_of(replace(SMALL, press=("KnormPress",), ratio=(0.9,))))
    with pytest.raises(UserError, match="seed was 0, is 1"):
        Store(tmp_path, setup_of(replace(SMALL, seed=1)))


def test_other_weights_are_another_model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(Path(sweeps.__file__).parents[1] / "models" / "facts-llama", folder)
    assert model_fingerprint(str(folder)) == model_fingerprint("facts-llama")
    model = load_model(str(folder))[0]
    model.lm_head.weight.data[-1, -1] += 1
    model.save_pretrained(folder)
    assert model_fingerprint(str(folder)) != model_fingerprint("facts-llama")


def test_other_code_is_another_set_up(tmp_path, monkeypatch):
    (tmp_path / "press_core").mkdir()
    (tmp_path / "press_core" / "a.py").write_text("x = 1")
    monkeypatch.setattr(setup, "_ROOT", tmp_path)
    monkeypatch.setattr(setup, "_CODE", ("press_core",))
    before = setup.code_digest()
    (tmp_path / "press_core" / "a.py").write_text("x = 2")
    assert setup.code_digest() != before


def test_the_code_that_results_hang_on_is_there():
    assert all((setup._ROOT / part).exists() for part in setup._CODE)


# ---- engines -----------------------------------------------------------------------------------


def test_the_serial_engine_goes_on_after_a_failure():
    found = list(serial([1, 0, 2], lambda n: 2 // n))
    reason = "ZeroDivisionError: integer division or modulo by zero"
    assert found == [(1, 2), (0, Failure(reason)), (2, 1)]


def test_ray_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"hook-or-patch\[ray\].*leave out --on ray"):
        list(on_ray([1], str))


# ---- command -----------------------------------------------------------------------------------

app = typer.Typer()
app.command()(sweeps.command)


def call(*args):
    small = "--samples", "4", "--threads", "1", "--dataset", "facts/single@48"
    return CliRunner().invoke(app, [*small, *map(str, args)], env={"COLUMNS": "160"})


def test_the_command(tmp_path):
    args = ["--press", "KnormPress", "--ratio", "0", "--ratio", "0.5", "--output", tmp_path]
    result = call(*args)
    assert result.exit_code == 0, result.output
    for words in ("facts/single@48", "no press", "Knorm", "50%", "patch", f"results: {tmp_path}"):
        assert words in result.output
    assert "tokens" not in result.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "setup.json",
        "cells",
        "results.csv",
        "predictions.csv",
    }
    again = call(*args)
    assert "3 of 3 cells are finished already" in again.output
    other = call(*args, "--seed", "3")
    assert isinstance(other.exception, UserError)
    assert "seed was 0, is 3" in str(other.exception)


def test_the_command_with_a_budget(tmp_path):
    result = call("--press", "KnormPress", "--budget", "12", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if "Knorm" in line]
    assert [line[2:6] for line in lines] == [["12", "tokens", "76%", m] for m in ("hook", "patch")]
    wrong = call("--press", "KnormPress", "--budget", "0", "--output", tmp_path)
    assert "budget is 0; input should be greater than or equal to 1" in str(wrong.exception)


def test_the_command_reads_a_file_and_tells_failures(tmp_path):
    (tmp_path / "sweep.yaml").write_text(
        "press: PerLayerCompressionPress(KnormPress(), [ratio])\nratio: [0.5]\nmechanism: hook\n"
    )
    result = call("--config", tmp_path / "sweep.yaml", "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "no result: facts/single@48 PerLayerCompressionPress" in result.output


FLAGS = (
    "config output model press ratio budget mechanism dataset samples seed batch-size "
    "compress-questions max-context-length dtype attn-implementation device threads data format on "
    "ray-address ray-gpus retries fraction max-new-tokens needle-depth custom-generate "
    "trust-remote-code"
)


def test_the_command_has_its_flags(tmp_path):
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "160"}).output
    for name in FLAGS.split():
        assert f"--{name} " in shown
    given = ["--needle-depth", "0.5", "--compress-questions", "--fraction", "0.5"]
    result = call(*given, "--output", tmp_path / "out")
    assert isinstance(result.exception, UserError) or "no fraction" in result.output


def test_an_interrupted_command_says_how_to_continue(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeps, "run_cell", interrupt)
    result = call("--output", tmp_path)
    assert result.exit_code == 130
    assert "the same command continues" in result.output


# ---- the study ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    few = Settings(
        dataset=("facts/single@96", "facts/multikey@96", "facts/multiquery@96"),
        press=("KnormPress", "AdaKVPress(SnapKVPress(window_size=8))"),
        samples=4,
        threads=1,
    )
    made = evaluate.EXPERIMENT.measure(few, Progress(disable=True))
    path = tmp_path_factory.mktemp("study") / "evaluate.csv"
    write_table(made["evaluate"], path)
    return {"evaluate": read_table(path)}


def test_the_study_reads_its_tables(tables):
    text = evaluate.EXPERIMENT.markdown(tables)
    assert "Hook and patch gave the same answers in all of **12** cells." in text
    assert "| press | one fact, 50% evicted | 1 of 16 facts, 50% evicted |" in text
    table = tables["evaluate"]
    value = table[
        (table["dataset"] == "facts/multikey@96")
        & (table["press"] == "KnormPress")
        & (table["ratio"] == 0.8)
    ]["score"].iloc[0]
    line = next(line for line in text.splitlines() if line.startswith("| Knorm |"))
    assert line.split("|")[6].strip() == f"{value:.1%}"
    assert "| AdaKV(SnapKV(window_size=8)) |" in text


def test_the_study_reads_budgets(tables):
    """As it would read a sweep that was told numbers of tokens beside a ratio."""
    table = tables["evaluate"].copy()
    few = table["ratio"] == 0.8
    table.loc[few, "budget"] = 16.0
    table.loc[few, "ratio"] = float("nan")
    text = evaluate.EXPERIMENT.markdown({"evaluate": table})
    assert "| one fact, 50% evicted |" in text
    assert "| one fact, all but 16 tokens evicted |" in text
    assert "With all but 16 tokens of the context evicted, " in text
    assert "Hook and patch gave the same answers in all of **12** cells." in text
    figure = evaluate.EXPERIMENT.figures({"evaluate": table})["evaluate"]
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["50% of the context evicted", "all but 16 tokens of the context evicted"]
    before = {"evaluate": tables["evaluate"].drop(columns="budget")}
    assert evaluate.EXPERIMENT.markdown(before) == evaluate.EXPERIMENT.markdown(tables)


def test_the_study_does_not_claim_agreement_that_is_not_there(tables):
    table = tables["evaluate"].copy()
    table.loc[(table["mechanism"] == "patch").idxmax(), "answers"] = "something else"
    text = evaluate.EXPERIMENT.markdown({"evaluate": table})
    assert "Hook and patch gave other answers in **1** of 12 cells." in text


def test_the_figure_shows_every_score(tables):
    figure = evaluate.EXPERIMENT.figures(tables)["evaluate"]
    assert [axes.get_title("left") for axes in figure.axes] == [
        "50% of the context evicted",
        "80% of the context evicted",
    ]
    shown = [text.get_text() for axes in figure.axes for text in axes.texts]
    table = tables["evaluate"]
    hooks = table[table["mechanism"] == "hook"]
    assert sorted(shown) == sorted(f"{score:.0%}" for score in hooks["score"])


def test_the_press_of_a_cell_is_told_in_full():
    cell = Cell("facts/single@48", "RandomPress", 0.5, "hook")
    assert press_text(replace(SMALL, seed=3), cell) == "RandomPress(compression_ratio=0.5, seed=3)"
    assert press_text(SMALL, Cell("facts/single@48", NO_PRESS, 0.0, "bare")) == NO_PRESS
