"""Sweeps: nothing is lost, doubled or mixed up."""

import contextlib
import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock, patch

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st

from experiments import UserError
from experiments.answers import sweep as sweeps
from experiments.answers.cells import Cell, Prediction, Result, plan, run_cell
from experiments.answers.store import Store, model_fingerprint, setup_of
from experiments.framework import environment
from experiments.loading import load_model
from tests.experiments.sweeping import FILES, ONE, SETUP, SMALL, assert_same, call, run_sweep

# ---- sweeps ------------------------------------------------------------------------------------


def test_a_sweep_keeps_all_it_takes_to_repeat_it(tmp_path):
    results, failures, _ = run_sweep(SMALL, tmp_path)
    assert failures == {}
    assert len(results) == len(plan(SMALL)) == 6
    found = pd.read_csv(tmp_path / "predictions.csv")
    assert len(found) == 6 * 8
    one = found[(found["dataset"] == "facts/single@48") & (found["mechanism"] == "hook")]
    press = "SnapKVPress(compression_ratio=0.5, window_size=8, kernel_size=5)"
    assert set(one["press_text"]) == {press}
    mean = found.groupby(["dataset", "mechanism"])["score"].mean()
    for row in results.itertuples():
        assert mean[row.dataset, row.mechanism] == row.score
        assert not row.low > row.score
        assert not row.high < row.score  # there may be no interval


def test_an_interrupted_sweep_continues(tmp_path, ran):
    whole = run_sweep(SMALL, tmp_path / "whole")[0]
    ran.clear()
    third = Mock(wraps=sweeps.run_cell, side_effect=[DEFAULT, DEFAULT, KeyboardInterrupt])
    with patch.object(sweeps, "run_cell", third), pytest.raises(KeyboardInterrupt):
        run_sweep(SMALL, tmp_path / "cut")
    assert len(pd.read_csv(tmp_path / "cut" / "results.csv")) == 2
    continued, _, printed = run_sweep(SMALL, tmp_path / "cut")
    assert sorted(ran) == sorted(plan(SMALL))  # each once
    assert "2 of 6 cells" in printed
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
    return Path(shutil.copytree(swept[0], tmp_path / "sweep"))


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
@drawn()
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
    with pytest.raises(UserError, match=f"another sweep .*{tmp_path}"):
        run_sweep(SMALL, tmp_path)
    assert len(Store(tmp_path, SETUP).finished()) == 1


def test_a_full_disk_loses_nothing(tmp_path, swept, ran):
    def full(path, content, write=Path.write_bytes):
        if path.parent.name == "cells" and any(path.parent.glob("*.json")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    words = r"cannot write .*: No space left.* repeat"
    with patch.object(Path, "write_bytes", full), pytest.raises(UserError, match=words):
        run_sweep(ONE, tmp_path)
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


def test_a_model_that_cannot_be_loaded_is_told_once_and_can_be_corrected(tmp_path):
    result = call("--output", tmp_path, "--device", "abacus")
    assert "device 'abacus'" in str(result.exception), result.output
    assert "abacus" not in result.output
    call("--output", tmp_path, "--press", "KnormPress", "--ratio", "0.5", status=0)


def test_a_cell_that_fails_takes_nothing_from_the_others(tmp_path):
    wrong = "PerLayerCompressionPress(SnapKVPress(window_size=8), [ratio])"
    settings = replace(ONE, press=(wrong, "KnormPress"))
    results, failures, printed = run_sweep(settings, tmp_path)
    assert len(results) == 3
    ((reason, failed),) = failures.items()
    assert ([cell.press for cell in failed], "4" in reason) == ([wrong] * 2, True)  # its layers
    assert (printed.count("HyperparameterError"), printed.count("as above")) == (1, 1)


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1), ("versions", {"torch": "2"}), ("samples", 3)]
)
def test_set_ups_are_not_mixed(copied, name, value):
    """Neither by a later sweep, nor by one that began before there was a cell."""
    Store(copied, SETUP | {"made_with": {"date": "later"}})
    with pytest.raises(UserError, match=f"{name} was .*another --output"):
        Store(copied, SETUP | {name: value})
    earlier = Store(copied / "new", SETUP | {name: value})
    run_sweep(ONE, copied / "new")
    with pytest.raises(UserError, match=f"{name} was .*another --output"):
        earlier.save(next(iter(earlier.finished().values())))


def test_predictions_come_back_as_they_were(tmp_path):
    told = [(0, "12e4", "007", 1.0), (1, "3456", ' a,\n"b"\rc ', 0.1), (2, "0", "\ud800", 0.0)]
    same = {"question": "q", "answers": ["1"], "metric": "f1"}
    rows = [Prediction(sample=i, context=c, prediction=p, score=s, **same) for i, c, p, s in told]
    cell, kept = Cell("d", "KnormPress", None, "hook"), Store(tmp_path, SETUP)
    assert not kept.finished()
    kept.save(Result(cell=cell, press_text="p", evicted=0.5, seconds=1, predictions=rows))
    found = kept.finished()[cell].predictions
    assert found == [*rows[:2], rows[2].model_copy(update={"prediction": "?"})]  # no character
    (row,) = kept.write_tables([cell]).to_dict("records")
    assert row["score"] == pytest.approx(1.1 / 3)
    table = pd.read_csv(tmp_path / "predictions.csv", dtype=str, keep_default_na=False)
    assert list(table["context"]) == ["12e4", "3456", "0"]
    assert list(table["prediction"]) == ["007", ' a,\n"b"\rc ', "?"]
    assert json.loads(table["answers"][0]) == ["1"]


# ---- what made the results ---------------------------------------------------------------------


def test_the_set_up_says_what_made_the_results(tmp_path):
    made = setup_of(SMALL)
    assert sorted(made["versions"]) == ["numpy", "python", "torch", "transformers", "wrapt"]
    assert made["versions"]["torch"] == torch.__version__
    assert made["threads"] == 1
    assert {"date", "commit", "versions", "machine"} <= set(made["made_with"])
    assert not {"press", "ratio", "mechanism", "dataset"} & set(made)
    Store(tmp_path, made)
    Store(tmp_path, setup_of(replace(SMALL, press=("KnormPress",), ratio=(0.9,))))
    assert made | {"seed": 1} == setup_of(replace(SMALL, seed=1)) | {"made_with": made["made_with"]}


def test_other_weights_or_another_template_are_another_model(tmp_path):
    folder = str(tmp_path / "model")
    shutil.copytree(Path(sweeps.__file__).parents[1] / "models" / "facts-llama", folder)
    assert model_fingerprint(folder) == model_fingerprint("facts-llama")
    Path(folder, "chat_template.jinja").write_text("{{ messages }}")
    asked_otherwise = model_fingerprint(folder)
    model = load_model(folder)[0]
    model.lm_head.weight.data[-1, -1] += 1
    model.save_pretrained(folder)
    assert len({model_fingerprint("facts-llama"), asked_otherwise, model_fingerprint(folder)}) == 3


@pytest.mark.parametrize("status", [0, 128])  # of git, which may know nothing of this code
def test_other_code_is_another_set_up(tmp_path, monkeypatch, status):
    assert all((environment._ROOT / part).exists() for part in environment._CODE)
    (tmp_path / "press_core").mkdir()
    (tmp_path / "press_core" / "a.py").write_text("x = 1")
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    monkeypatch.setattr(environment, "_CODE", ("press_core",))
    # What git prints: a commit, and that something was changed.
    monkeypatch.setattr("subprocess.run", lambda *_, **__: Mock(returncode=status, stdout="0a1b"))
    before = environment.code_digest(), environment.commit()
    (tmp_path / "press_core" / "a.py").write_text("x = 2")
    assert not {environment.code_digest(), environment.commit()} & {*before}
