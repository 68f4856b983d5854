"""Cells of a sweep, its engines and its command: what is asked for, and what is answered."""

import sys
from dataclasses import fields, replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import patch_impl
from experiments import UserError
from experiments.answers import cells
from experiments.answers import sweep as sweeps
from experiments.answers.cells import NO_PRESS, Cell, run_cell
from experiments.answers.datasets import load
from experiments.answers.engines import Failure, on_ray, serial
from experiments.answers.settings import Settings
from experiments.loading import load_model
from experiments.questions import evaluate
from tests.experiments.sweeping import FILES, SMALL, call
from tests.experiments.tiny import SILENT, read_again
from tests.support import ran

# ---- cells -------------------------------------------------------------------------------------


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
        _, (_, logits) = ran(model, press, [context, question.input_ids])
        assert row.prediction == tokenizer.decode(logits[0, -1].argmax())
        assert row.score == float(row.prediction == sample.answers[0])
        assert (row.question, row.answers) == (sample.question, list(sample.answers))


def test_a_cell_is_the_same_whatever_ran_before():
    sampled = {"do_sample": True, "eos_token_id": [2, 3]}
    settings = replace(SMALL, press=("RandomPress",), generation=sampled)
    cell = Cell("facts/single@48", "RandomPress", 0.5, "hook")
    first = run_cell(settings, cell).predictions
    torch.manual_seed(99)
    state = torch.get_rng_state()
    run_cell(settings, Cell("facts/multiquery@48", "RandomPress", 0.5, "patch"))
    assert run_cell(settings, cell).predictions == first
    assert torch.equal(torch.get_rng_state(), state)
    assert run_cell(settings, cell._replace(mechanism="patch")).predictions == first
    assert run_cell(replace(settings, seed=1), cell).predictions != first


def test_the_press_of_a_cell_is_told_in_full():
    cell = Cell("facts/single@48", "RandomPress", 0.5, "hook")
    told = run_cell(replace(SMALL, seed=3), cell).press_text
    assert told == "RandomPress(compression_ratio=0.5, seed=3)"
    assert run_cell(SMALL, Cell(cell.dataset, NO_PRESS, 0.0, "bare")).press_text == NO_PRESS


def test_arguments_for_the_model_reach_it():
    settings = replace(SMALL, model_kwargs={"max_position_embeddings": 20})
    with pytest.raises(UserError, match="20 positions"):
        run_cell(settings, Cell("facts/single@48", NO_PRESS, 0.0, "bare"))


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_model_is_trusted_by_its_flag_alone(monkeypatch, tmp_path, trusted):
    load = Mock(return_value=load_model("facts-llama"))
    monkeypatch.setattr(cells, "load_model", load)
    flag = ["--trust-remote-code"] if trusted else []
    call("--ratio", "0", "--seed", 40 + trusted, *flag, "--output", tmp_path, status=0)
    assert load.call_args.kwargs["trust_remote_code"] is trusted


# ---- engines -----------------------------------------------------------------------------------


def test_the_serial_engine_goes_on_after_a_failure():
    found = list(serial([1, 0, 2], lambda n: 2 // n))
    reason = "ZeroDivisionError: integer division or modulo by zero"
    assert found == [(1, 2), (0, Failure(reason)), (2, 1)]


def test_ray_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"hook-or-patch\[ray\].*--on ray"):
        list(on_ray([1], str))


# ---- command -----------------------------------------------------------------------------------


def test_the_command(tmp_path):
    args = ["--press", "KnormPress", "--ratio", "0", "--ratio", "0.5", "--output", tmp_path]
    result = call(*args, status=0)
    for words in ("facts/single@48", "no press", "Knorm", "50%", "patch", f"results: {tmp_path}"):
        assert words in result.output
    assert "tokens" not in result.output
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert "3 of 3 cells" in call(*args).output
    assert "…" not in call(*args, width=50).output  # names are not cut
    other = call(*args, "--seed", "3")
    assert isinstance(other.exception, UserError)
    assert "seed was 0, is 3" in str(other.exception)


def test_the_command_reads_a_file_and_tells_failures(tmp_path):
    (tmp_path / "sweep.yaml").write_text(
        "press: PerLayerCompressionPress(KnormPress(), [ratio])\nratio: [0.5]\n"
    )
    result = call("--config", tmp_path / "sweep.yaml", "--output", tmp_path / "out", status=1)
    told = " ".join(result.output.split()).partition("no result: facts/single@48 PerLayerComp")[2]
    assert "hook and 1 more: Hyper" in told


def test_the_command_has_a_flag_for_every_setting(tmp_path):
    shown = call("--help").output
    own = "config", "output", "on", "ray_address", "ray_gpus", "retries"
    names = {field.name for field in fields(Settings)} - {"generation", "model_kwargs"}
    for name in (*own, *names):
        assert f"--{name.replace('_', '-')} " in shown
    given = ["--needle-depth", "0.5", "--compress-questions"]
    assert "has no needle" in call(*given, "--output", tmp_path / "out", status=1).output


def test_an_interrupted_command_says_how_to_continue(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "run_cell", Mock(side_effect=KeyboardInterrupt))
    assert "the same command continues" in call("--output", tmp_path, status=130).output


# ---- the study ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    few = Settings(
        dataset=("facts/single@96", "facts/multikey@96", "facts/multiquery@96"),
        press=("KnormPress", "AdaKVPress(SnapKVPress(window_size=8))"),
        samples=4,
        threads=1,
    )
    return read_again(evaluate.EXPERIMENT.measure(few, SILENT), tmp_path_factory.mktemp("study"))


def test_the_study_claims_the_agreement_that_is_there(tables):
    assert evaluate.EXPERIMENT.findings(tables)[1].number == 0
    table = tables["evaluate"].copy()
    table.loc[(table["mechanism"] == "patch").idxmax(), "answers"] = "something else"
    assert evaluate.EXPERIMENT.findings({"evaluate": table})[1].number == 1


def test_the_best_press_has_an_interval_over_contexts(tables):
    best, _ = evaluate.EXPERIMENT.findings(tables)
    low, high = best.interval
    assert low < best.number < high
    one_context = {"evaluate": tables["evaluate"].assign(contexts="0 0 0 0")}
    few, _ = evaluate.EXPERIMENT.findings(one_context)  # one for each of three tasks
    assert few.number == best.number
    assert np.isnan(few.interval).all()
