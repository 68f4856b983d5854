"""Sweeps: what is asked for, what is answered, and that nothing is lost, doubled or mixed up."""

from __future__ import annotations

import contextlib
import errno
import json
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
from experiments.answers.cells import NO_PRESS, Cell, Prediction, Result, plan, run_cell
from experiments.answers.datasets import load
from experiments.answers.engines import Failure, on_ray, serial
from experiments.answers.presses import make_press
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
ONE = replace(SMALL, dataset=("facts/single@48",))
SETUP = {"model": "facts-llama", "seed": 0, "versions": {"torch": "1"}, "made_with": {"date": "x"}}
EXAMPLES = sorted(Path(sweeps.__file__).parent.glob("examples/*.yaml"))
REFUSED = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text("utf-8"))
FILES = {"setup.json", "cells", "results.csv", "predictions.csv"}
DECODING = "DecodingPress(KnormPress())"
DUO = "DuoAttentionPress(head_compression_ratio=ratio)"


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ran(monkeypatch):
    """The cells that sweeps run."""
    seen = []
    monkeypatch.setattr(sweeps, "run_cell", lambda s, c: seen.append(c) or run_cell(s, c))
    return seen


def run_sweep(settings, folder, **ray):
    """Run a sweep in `folder`; returns results, failures and what was printed."""
    printed = StringIO()
    kept = Store(folder, SETUP)
    return *sweep(settings, kept, Console(file=printed, width=200), **ray), printed.getvalue()


def assert_same(results, others):
    pd.testing.assert_frame_equal(*(t.drop(columns="seconds") for t in (results, others)))


def answers_of(settings, cell):
    return run_cell(settings, cell).predictions


# ---- presses as text ---------------------------------------------------------------------------


BOTH = "ComposedPress([KnormPress({}), TOVAPress({})])"


@pytest.mark.parametrize(
    ("text", "amount", "python"),
    [
        ("SnapKVPress", 0.25, "SnapKVPress(0.25)"),
        ("SnapKVPress()", 0.25, "SnapKVPress(0.25)"),
        ("SnapKVPress(0.9, window_size=8)", 0.25, "SnapKVPress(0.25, window_size=8)"),
        ("AdaKVPress(SnapKVPress(), 0.1)", 0.25, "AdaKVPress(SnapKVPress(0.25), 0.1)"),
        ("RandomPress", 0.25, "RandomPress(0.25, seed=7)"),
        ("RandomPress(seed=3)", 0.25, "RandomPress(0.25, seed=3)"),
        (BOTH.format("ratio", "ratio"), 0.25, BOTH.format(0.25, 0.25)),
        (DUO, 0.25, "DuoAttentionPress(head_compression_ratio=0.25)"),
        ("SnapKVPress", Tokens(24), "SnapKVPress(Tokens(24))"),
        ("AdaKVPress(SnapKVPress())", Tokens(24), "AdaKVPress(SnapKVPress(Tokens(24)))"),
        (DECODING, Tokens(24), "DecodingPress(KnormPress(), target_size=24)"),
        (BOTH.format(0.5, "Tokens(budget)"), Tokens(24), BOTH.format(0.5, "Tokens(24)")),
        ("SimLayerKVPress(n_recent=budget)", Tokens(24), "SimLayerKVPress(n_recent=24)"),
        ("KnormPress(Tokens(8, 0.5))", None, "KnormPress(Tokens(8, 0.5))"),
    ],
)
def test_a_press_is_what_its_text_says(text, amount, python):
    for mechanism, package in (("hook", hooks_impl), ("patch", patch_impl)):
        press = make_press(text, mechanism, amount, 7)
        assert press == eval(python, {**vars(package), "Tokens": Tokens})
        assert make_press(repr(press), mechanism, None, 0) == press


@pytest.mark.parametrize(
    ("text", "amount", "words"),
    [
        *REFUSED["presses"],
        ("(" * 9999, None, "cannot read the press"),
        ("-" * 9999 + "1", None, "cannot read the press|is not allowed"),
    ],
)
def test_what_is_no_press_is_refused_in_words(text, amount, words):
    told = amount and (Tokens(amount["budget"]) if "budget" in amount else amount["ratio"])
    with pytest.raises(UserError, match=words):
        make_press(text, "hook", told, 0)


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
    file.write_text("budget: 64")  # in place of ratios that nobody gave
    assert (settings_from(file, {}).ratio, settings_from(file, {}).budget) == ((0.0,), (64,))
    assert settings_from(file, {"ratio": [0.5]}).ratio == (0.5,)
    file.write_text("budget: []")
    assert settings_from(file, {}) == Settings()


@pytest.mark.parametrize(("text", "words"), [*REFUSED["settings"], ("[" * 2000, "is not YAML")])
def test_settings_that_cannot_be_are_named(tmp_path, text, words):
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        settings_from(tmp_path / "sweep.yaml", {})
    with pytest.raises(UserError, match="there is no file"):
        settings_from(tmp_path / "other.yaml", {})


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


WORDS = [*"()[]{}=:,.-\\' ", "SnapKVPress", "AdaKVPress", "ratio", "window_size", "0.5", "lambda "]
ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.dates()
VALUES = st.recursive(
    ATOMS | st.lists(st.sampled_from(WORDS), max_size=14).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ATOMS, inner, max_size=3),
    max_leaves=6,
)
SETTINGS = st.dictionaries(st.sampled_from([f.name for f in fields(Settings)]) | ATOMS, VALUES)


def test_presses_and_settings_read_anything_without_a_traceback(tmp_path):
    """Whatever a file says is settings that can be planned, or is refused in words."""
    file = tmp_path / "sweep.yaml"

    @given(st.binary(max_size=40) | SETTINGS.map(lambda told: yaml.safe_dump(told).encode()))
    @drawn(deadline=None)
    def read(text):
        file.write_bytes(text)
        with contextlib.suppress(UserError, HyperparameterError):
            plan(settings_from(file, {}))

    read()
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_cells_are_the_grid_each_once():
    settings = Settings(
        dataset=("facts", "facts/single"),
        press=("SnapKVPress", DECODING, "SnapKVPress"),
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
        (DECODING, None, "hook", None),
        (DECODING, None, "patch", None),
    ]


def test_cells_of_budgets():
    settings = Settings(
        dataset=("facts/single",),
        press=("SnapKVPress", DECODING, DUO, "SimLayerKVPress(n_recent=budget)", "ThinKPress"),
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
        (DECODING, None, 64),
        (DECODING, None, 32),
        (DUO, 0.5, None),
        ("SimLayerKVPress(n_recent=budget)", None, 64),
        ("SimLayerKVPress(n_recent=budget)", None, 32),
        ("ThinKPress", None, None),
    ]
    made = [cell.make(0) for cell in cells[1:4]]
    assert [made[0].amount, made[1].amount, made[2].target_size] == [Tokens(64), Tokens(32), 64]


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"press": ("KnormPress", "nosuch")}, UserError, "there is no press"),
        ({"dataset": ("nosuch",)}, UserError, "there is no dataset"),
        ({"press": ("SnapKVPress(window_size=0)",)}, HyperparameterError, "window_size"),
        ({"press": (DUO,), "ratio": (0.0,), "budget": (64,)}, UserError, "no number of tokens; gi"),
    ],
)
def test_mistakes_show_before_anything_is_run(changed, error, words):
    with pytest.raises(error, match=words):
        plan(replace(SMALL, **changed))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_can_be_planned(path):
    settings = settings_from(path, {})
    assert plan(settings)
    if path.stem == "study":
        assert settings == Settings()


def test_a_cell_scores_what_the_model_answers():
    """Against the model called by hand, one context and one question at a time."""
    cell = Cell("facts/multiquery@48", "SnapKVPress(window_size=8)", 0.5, "patch")
    model, tokenizer = load_model("facts-llama")
    result = run_cell(SMALL, cell)
    assert result.evicted == pytest.approx(1 - int(49 * 0.5) / 49)
    press = patch_impl.SnapKVPress(0.5, window_size=8)
    samples = load(cell.dataset, SMALL, tokenizer)
    for row, sample in zip(result.predictions, samples, strict=True):
        context = tokenizer(sample.context, return_tensors="pt").input_ids
        question = tokenizer(sample.question, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad(), press(model):
            cache = model(context, use_cache=True).past_key_values
            logits = model(question.input_ids, past_key_values=cache).logits
        assert row.prediction == tokenizer.decode(logits[0, -1].argmax())
        assert row.score == float(row.prediction == sample.answers[0])
        assert (row.question, row.answers) == (sample.question, list(sample.answers))


def test_a_cell_is_the_same_whatever_ran_before():
    sampled = {"do_sample": True, "eos_token_id": [2, 3]}
    settings = replace(SMALL, press=("RandomPress",), generation=sampled)
    cell = Cell("facts/single@48", "RandomPress", 0.5, "hook")
    first = answers_of(settings, cell)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    run_cell(settings, Cell("facts/multiquery@48", "RandomPress", 0.5, "patch"))
    assert answers_of(settings, cell) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert answers_of(settings, cell._replace(mechanism="patch")) == first
    assert answers_of(replace(settings, seed=1), cell) != first


def test_the_press_of_a_cell_is_told_in_full():
    cell = Cell("facts/single@48", "RandomPress", 0.5, "hook")
    told = run_cell(replace(SMALL, seed=3), cell).press_text
    assert told == "RandomPress(compression_ratio=0.5, seed=3)"
    assert run_cell(SMALL, Cell(cell.dataset, NO_PRESS, 0.0, "bare")).press_text == NO_PRESS


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
    found = pd.read_csv(tmp_path / "predictions.csv")
    assert len(found) == 6 * 8
    one = found[(found["dataset"] == "facts/single@48") & (found["mechanism"] == "hook")]
    assert set(one["press_text"]) == {
        "SnapKVPress(compression_ratio=0.5, window_size=8, kernel_size=5)"
    }
    mean = found.groupby(["dataset", "mechanism"])["score"].mean()
    for row in results.itertuples():
        assert mean[row.dataset, row.mechanism] == row.score
        assert not row.low > row.score
        assert not row.high < row.score  # there may be no interval


def test_an_interrupted_sweep_continues(tmp_path, monkeypatch, ran):
    whole = run_sweep(SMALL, tmp_path / "whole")[0]
    ran.clear()
    go_on = sweeps.run_cell

    def interrupted(settings, cell):
        if len(ran) == 2:
            raise KeyboardInterrupt
        return go_on(settings, cell)

    monkeypatch.setattr(sweeps, "run_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(SMALL, tmp_path / "cut")
    monkeypatch.setattr(sweeps, "run_cell", go_on)
    continued, _, printed = run_sweep(SMALL, tmp_path / "cut")
    assert sorted(ran) == sorted(plan(SMALL))  # each once
    assert "2 of 6 cells are finished already" in printed
    assert_same(continued, whole)
    again, _, _ = run_sweep(SMALL, tmp_path / "cut")
    assert len(ran) == 6
    pd.testing.assert_frame_equal(again, continued)


def test_a_sweep_of_budgets_is_told_from_one_of_ratios(tmp_path, ran):
    run_sweep(ONE, tmp_path)
    ran.clear()
    _, failures, printed = run_sweep(replace(ONE, budget=(24, 12)), tmp_path)
    assert failures == {}
    assert [(cell.ratio, cell.budget) for cell in ran] == [(None, 24), (None, 12)] * 2
    assert "SnapKVPress(window_size=8)  24 tokens  hook: " in printed
    table = pd.read_csv(tmp_path / "results.csv", dtype={"budget": str})
    told = table[table["mechanism"] == "hook"][["ratio", "budget", "evicted"]].round(4)
    assert told.astype(object).where(told.notna(), None).to_numpy().tolist() == [
        [0.5, None, round(1 - 24 / 49, 4)],
        [None, "24", round(1 - 24 / 49, 4)],
        [None, "12", round(1 - 12 / 49, 4)],
    ]
    # As many tokens by share and by number: the same answers.
    found = pd.read_csv(tmp_path / "predictions.csv", dtype={"budget": str})
    texts = found[found["mechanism"] == "hook"].groupby(["ratio", "budget"], dropna=False)
    same = [list(rows["prediction"]) for _, rows in texts]
    assert same[0] == same[2]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A folder with the three cells of `ONE`, and its results."""
    folder = tmp_path_factory.mktemp("swept")
    return folder, run_sweep(ONE, folder)[0]


@pytest.fixture
def copied(swept, tmp_path):
    shutil.copytree(swept[0], tmp_path / "sweep")
    return tmp_path / "sweep"


def half_a_cell(path):
    (path / "cells" / ".one.json.00.part").write_text('{"key": ')


def no_cell(path):
    next((path / "cells").glob("*.json")).unlink()


def half_tables(path):
    (path / "results.csv").write_bytes((path / "results.csv").read_bytes()[:30])
    (path / "predictions.csv").unlink()


@pytest.mark.parametrize(("damage", "n"), [(half_a_cell, 0), (no_cell, 1), (half_tables, 0)])
def test_what_is_missing_is_run_again(copied, swept, ran, damage, n):
    damage(copied)
    after, _, _ = run_sweep(ONE, copied)
    assert len(ran) == n
    assert_same(after, swept[1])
    assert len(pd.read_csv(copied / "predictions.csv")) == 3 * 8
    assert json.loads((copied / "setup.json").read_text()) == SETUP


@given(st.integers(0, 600), st.binary(min_size=1, max_size=200), st.booleans())
@drawn(deadline=None)
def test_a_damaged_cell_is_refused_in_words(swept, tmp_path_factory, place, content, cut):
    """Whatever its bytes say: results, or one error, and nothing is written anywhere else."""
    outer = tmp_path_factory.mktemp("damaged")
    shutil.copytree(swept[0], outer / "sweep")
    cell = min((outer / "sweep" / "cells").iterdir())
    whole = cell.read_bytes()
    start = place * len(whole) // 600
    cell.write_bytes(whole[:start] + content + (b"" if cut else whole[start + len(content) :]))
    with contextlib.suppress(UserError):
        Store(outer / "sweep", SETUP).write_tables()
    assert [path.name for path in outer.iterdir()] == ["sweep"]


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null", "3", '"setup"'])
def test_a_set_up_that_says_nothing_is_refused(copied, content):
    (copied / "setup.json").write_text(content)
    with pytest.raises(UserError, match=r"no file of a sweep|another set-up"):
        Store(copied, SETUP)


def test_a_second_sweep_in_a_folder_is_told_of_the_first(tmp_path, monkeypatch):
    """Both have found the cell missing; the one that is finished first has written it."""

    def overtaken(settings, cell):
        result = run_cell(settings, cell)
        Store(tmp_path, SETUP).save(result)
        return result

    monkeypatch.setattr(sweeps, "run_cell", overtaken)
    with pytest.raises(UserError, match=f"another sweep is writing to {tmp_path}"):
        run_sweep(SMALL, tmp_path)
    assert len(Store(tmp_path, SETUP).finished()) == 1


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, swept, ran):
    def full(path, content):
        if path.parent.name == "cells" and any(path.parent.glob("*.json")):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_at_once(path, content)

    monkeypatch.setattr(store, "write_at_once", full)
    with pytest.raises(UserError, match=r"No space left.*the same command again"):
        run_sweep(ONE, tmp_path)
    monkeypatch.setattr(store, "write_at_once", write_at_once)
    ran.clear()
    assert_same(run_sweep(ONE, tmp_path)[0], swept[1])
    assert len(ran) == 2


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_and_links_of_others_are_not_touched(tmp_path, name):
    for content in (b"mine", b""):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="another --output"):
            Store(tmp_path, SETUP)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: content}
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="another --output"):
        Store(tmp_path, SETUP)
    assert not (tmp_path / "outside").exists()


def test_an_output_that_cannot_be_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "run_cell", lambda *_: pytest.fail("worked first"))
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "inside"):
        result = call("--output", output)
        assert isinstance(result.exception, UserError), result.output
    assert (tmp_path / "file").read_text() == "mine"


def test_a_cell_that_fails_takes_nothing_from_the_others(tmp_path):
    wrong = "PerLayerCompressionPress(SnapKVPress(window_size=8), [ratio])"
    settings = replace(ONE, press=(wrong, "KnormPress"))
    results, failures, printed = run_sweep(settings, tmp_path)
    assert len(results) == 3
    assert {cell.press for cell in failures} == {wrong}
    assert all("4" in reason for reason in failures.values())  # layers of the model
    assert printed.count("HyperparameterError") == 2


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1), ("versions", {"torch": "2"}), ("samples", 3)]
)
def test_set_ups_are_not_mixed(tmp_path, name, value):
    Store(tmp_path, SETUP)
    Store(tmp_path, SETUP | {"made_with": {"date": "later"}})
    with pytest.raises(UserError, match=f"another set-up.*{name} was .*give another --output"):
        Store(tmp_path, SETUP | {name: value})


def test_predictions_come_back_as_they_were(tmp_path):
    told = [(0, "12e4", "007", 1.0), (1, "3456", ' a,\n"b" ', 0.1), (2, "0", "\ud800", 0.0)]
    rows = [
        Prediction(sample=i, context=c, question="q", answers=["1"], prediction=p, metric="f1",
                   score=s, also={"bleu_1": s})
        for i, c, p, s in told
    ]  # fmt: skip
    cell, kept = Cell("d", "KnormPress", None, "hook"), Store(tmp_path, SETUP)
    assert not kept.finished()
    kept.save(Result(cell=cell, press_text="p", evicted=0.5, seconds=1, predictions=rows))
    found = kept.finished()[cell].predictions
    assert found == [*rows[:2], rows[2].model_copy(update={"prediction": "?"})]  # no character
    (row,) = kept.write_tables([cell]).to_dict("records")
    assert row["score"] == json.loads(row["also"])["bleu_1"] == pytest.approx(1.1 / 3)
    table = pd.read_csv(tmp_path / "predictions.csv", dtype=str, keep_default_na=False)
    assert list(table["context"]) == ["12e4", "3456", "0"]
    assert list(table["prediction"]) == ["007", ' a,\n"b" ', "?"]
    assert json.loads(table["answers"][0]) == ["1"]


# ---- what made the results ---------------------------------------------------------------------


def test_the_set_up_says_what_made_the_results(tmp_path):
    made = setup_of(SMALL)
    assert made["versions"]["torch"] == torch.__version__
    assert made["threads"] == 1
    assert {"date", "commit", "machine"} <= set(made["made_with"])
    assert not {"press", "ratio", "mechanism", "dataset"} & set(made)
    Store(tmp_path, made)
    Store(tmp_path, setup_of(replace(SMALL, press=("KnormPress",), ratio=(0.9,))))
    assert made | {"seed": 1} == setup_of(replace(SMALL, seed=1)) | {"made_with": made["made_with"]}


def test_other_weights_are_another_model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(Path(sweeps.__file__).parents[1] / "models" / "facts-llama", folder)
    assert model_fingerprint(str(folder)) == model_fingerprint("facts-llama")
    model = load_model(str(folder))[0]
    model.lm_head.weight.data[-1, -1] += 1
    model.save_pretrained(folder)
    assert model_fingerprint(str(folder)) != model_fingerprint("facts-llama")


def test_other_code_is_another_set_up(tmp_path, monkeypatch):
    assert all((setup._ROOT / part).exists() for part in setup._CODE)
    (tmp_path / "press_core").mkdir()
    (tmp_path / "press_core" / "a.py").write_text("x = 1")
    monkeypatch.setattr(setup, "_ROOT", tmp_path)
    monkeypatch.setattr(setup, "_CODE", ("press_core",))
    before = setup.code_digest()
    (tmp_path / "press_core" / "a.py").write_text("x = 2")
    assert setup.code_digest() != before


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
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert "3 of 3 cells are finished already" in call(*args).output
    other = call(*args, "--seed", "3")
    assert isinstance(other.exception, UserError)
    assert "seed was 0, is 3" in str(other.exception)


def test_the_command_reads_a_file_and_tells_failures(tmp_path):
    (tmp_path / "sweep.yaml").write_text(
        "press: PerLayerCompressionPress(KnormPress(), [ratio])\nratio: [0.5]\nmechanism: hook\n"
    )
    result = call("--config", tmp_path / "sweep.yaml", "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "no result: facts/single@48 PerLayerCompressionPress" in result.output


def test_the_command_has_a_flag_for_every_setting(tmp_path):
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "160"}).output
    own = "config", "output", "on", "ray_address", "ray_gpus", "retries"
    names = {field.name for field in fields(Settings)} - {"generation", "model_kwargs"}
    for name in (*own, *names):
        assert f"--{name.replace('_', '-')} " in shown
    given = ["--needle-depth", "0.5", "--compress-questions", "--fraction", "0.5"]
    result = call(*given, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "no fraction" in result.output


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


def test_the_study_claims_the_agreement_that_is_there(tables):
    text = evaluate.EXPERIMENT.markdown(tables)
    assert "Hook and patch gave the same answers in all of **12** cells." in text
    table = tables["evaluate"].copy()
    table.loc[(table["mechanism"] == "patch").idxmax(), "answers"] = "something else"
    text = evaluate.EXPERIMENT.markdown({"evaluate": table})
    assert "Hook and patch gave other answers in **1** of 12 cells." in text
