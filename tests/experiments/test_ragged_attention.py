"""Attention over ragged heads: all cases are timed, and told."""

from __future__ import annotations

import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments import UserError
from experiments.cli import app
from experiments.questions import ragged_attention
from experiments.questions.ragged_attention import EXPERIMENT, Case, Effort, Options, cases

CASES = [Case(family, 2, 2, 2, 16, 64, 0.5, 1) for family in ("llama", "gemma2", "gpt_oss")]


@pytest.fixture(scope="module")
def table():
    return ragged_attention.measure(CASES, Effort(rounds=2, repeats=1))


def test_every_case_is_timed_against_two_caches(table):
    assert len(table) == 3 * 2
    assert (table["time"] > 0).all()
    assert table["bytes"].between(0.5, 0.75).all()  # half of it, in whole blocks


def test_caches_that_are_too_large_are_left_out():
    assert ragged_attention.measure(CASES, Effort(most_bytes=1000)).empty


def test_all_combinations():
    options = Options(
        heads=("4x2x64", "8x1x32"), context=(1024, 4096), ratio=(0.5, 0.8), threads=(1, 2)
    )
    assert len(options.cases) == len(options.family) * 2 * 2 * 2 * 2 * 2
    assert options.cases == cases(
        options.family, (1, 8), [(4, 2, 64), (8, 1, 32)], (1024, 4096), (0.5, 0.8), (1, 2)
    )
    for wrong in ("8x4", "8x0x64", "8x4x63", "a"):
        with pytest.raises(UserError, match=f"--heads '{wrong}'"):
            _ = Options(heads=(wrong,)).cases


def test_what_is_told(table):
    table = table.copy()
    table.loc[table["against"] == "uniform", "time"] = [0.9, 1.0, 1.4]
    table.loc[table["against"] == "full", "time"] = 0.5
    table = table.assign(low=table["time"] - 0.05, high=table["time"] + 0.05)
    small, full = EXPERIMENT.findings({"ragged_attention": table})
    assert small.text.startswith("Below 4,096 tokens or 32 heads, ")
    assert "over even ones in **1** of 3 cases" in small.text
    assert "over the full cache in **3** of 3 cases" in full.text
    (view,) = EXPERIMENT.views({"ragged_attention": table})
    assert [row[0] for row in view.rows] == ["llama", "gemma2", "gpt_oss"]
    assert view.rows[0][1:5] == ["2", "2x2x16", "64", "1"]
    assert [row[-1] for row in view.rows] == ["0.50 [0.45, 0.55]"] * 3
    left, right = EXPERIMENT.figures({"ragged_attention": table})["ragged_attention"].axes
    assert left.get_lines()[1].get_ydata().tolist() == [0.9, 1.0, 1.4]
    assert right.get_lines()[1].get_ydata().tolist() == [0.5] * 3
    table["context"] = 4096
    large, _ = EXPERIMENT.findings({"ragged_attention": table})
    assert large.text.startswith("From 4,096 tokens or 32 heads on, ")


def test_command(tmp_path):
    sizes = ["--family", "llama", "--batch", "1", "--heads", "2x1x16", "--context", "64,128"]
    sizes += ["--ratio", "0.5,0.8", "--threads", "1"]
    args = ["ragged_attention", *sizes, "--rounds", "1", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, args, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert len(pd.read_csv(tmp_path / "ragged_attention.csv")) == 2 * 2 * 2
    assert (tmp_path / "ragged_attention.svg").stat().st_size > 3_000
    result = CliRunner().invoke(app, [*args, "--family", "mamba"], env={"COLUMNS": "160"})
    assert result.exit_code == 2
    assert "'mamba' is not measured here" in result.output
