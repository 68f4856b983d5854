"""Sizes of caches and peaks of prefills: counted exactly, and as arithmetic says."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from experiments import UserError
from experiments.cli import app
from experiments.framework.command import progress_bar
from experiments.questions import memory
from experiments.questions.memory import (
    EXPERIMENT,
    NO_PRESS,
    PRESSES,
    REAL,
    Cell,
    Shape,
    Size,
    hook_over_patch,
)
from experiments.testbed.facts import build_tokenizer
from experiments.testbed.families import build
from tests.support import snapshot, token_ids

SMALL = Size(contexts=(128, 256), both=128, twice=128)
CPU = torch.device("cpu")
SILENT = progress_bar(disable=True)


@pytest.fixture(scope="module")
def models():
    return {"shallow": build("llama"), "deep": build("llama", num_layers=4)}


@pytest.fixture(scope="module")
def tables(models):
    before = snapshot(models["shallow"])
    subjects = {name: (model, SMALL) for name, model in models.items()}
    table = memory.measure_prefills(subjects, SILENT)
    assert snapshot(models["shallow"]) == before
    return {"memory": table, "memory_models": memory.predicted()}


# ---- counting ------------------------------------------------------------------------------------


def test_the_peak_is_what_lives_at_once():
    def work():
        first = torch.zeros(1000, dtype=torch.float64)
        del first
        second = torch.zeros(1500, dtype=torch.float64)
        third = torch.zeros(500, dtype=torch.float64)
        del second, third
        torch.zeros(100)

    assert memory.peak_nbytes(CPU, work) == 8 * 2000


def test_what_was_there_before_does_not_count():
    held = torch.zeros(10_000)
    assert memory.peak_nbytes(CPU, lambda: held[:10].clone()) < held.nbytes


@pytest.mark.gpu
def test_the_peak_on_a_gpu():
    device = torch.device("cuda")
    held = torch.zeros(2**20, device=device)
    n_bytes = memory.peak_nbytes(device, lambda: torch.zeros(2**20, device=device))
    assert n_bytes == held.nbytes


def test_a_repeated_prefill_takes_the_same(models):
    ids = token_ids(1, 200)
    assert memory.prefill(models["deep"], ids, None) == memory.prefill(models["deep"], ids, None)


# ---- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untouched_cache_is_as_large_as_predicted(family, dtype):
    model = build(family, num_layers=3, dtype=dtype)
    _, held = memory.prefill(model, token_ids(1, 37), None)
    assert held == Shape.of(model).nbytes(37)


def test_published_models():
    """128k tokens of Llama-3.1-8B are 16 GiB, as 128 KiB per token come to."""
    assert REAL["Llama-3.1-8B"].nbytes(1) == 128 * 2**10
    table = memory.predicted().set_index(["model", "context", "ratio"])["bytes"] / 2**30
    assert len(table) == 4 * 3 * 3
    assert table["Llama-3.1-8B", 131072, 0.0] == 16
    assert table["Llama-3.1-70B", 131072, 0.5] == 20
    assert table["Llama-3.1-70B", 2**20, 0.8] == pytest.approx(64)
    assert table["Qwen3-32B", 32768, 0.0] == 8


def test_sliding_windows_are_refused():
    with pytest.raises(UserError, match="keep a sliding window"):
        Shape.of(build("gemma2", attn_implementation="eager"))


# ---- prefills ------------------------------------------------------------------------------------


def test_what_is_measured():
    cells = list(SMALL.cells())
    assert cells[0] == Cell(128)
    assert {(c.press, c.mechanism) for c in cells if c.context == 256} == {
        (NO_PRESS, "bare"),
        *((name, "hook") for name in PRESSES if name != "KVzipPress"),
    }
    assert sum(c.mechanism == "patch" for c in cells) == len(PRESSES)


def test_caches_are_as_large_as_predicted(tables):
    ratios = tables["memory"].groupby("press")["measured_over_predicted"].agg(["min", "max"])
    assert set(ratios.index) == {NO_PRESS, *PRESSES}
    for press in (NO_PRESS, "SnapKVPress", "ThinKPress"):
        assert ratios.loc[press].tolist() == [1, 1]
    for press in ("AdaKVPress", "KVzipPress"):  # heads of different lengths, with spare room
        assert 1 <= ratios.loc[press, "min"] <= ratios.loc[press, "max"] < 1.03
    held = tables["memory"].set_index(["model", "context", "press", "mechanism"])["bytes"]
    full = held["deep", 256, NO_PRESS, "bare"]
    assert full == 2 * 4 * 2 * 16 * 256 * 4
    assert held["deep", 256, "SnapKVPress", "hook"] == full / 2
    assert held["deep", 256, "ThinKPress", "hook"] == full * 3 / 4
    assert held["shallow", 256, NO_PRESS, "bare"] == full / 2


def test_both_mechanisms_leave_as_much(tables):
    held = tables["memory"].pivot(
        index=["model", "context", "press"], columns="mechanism", values="bytes"
    )
    both = held.dropna(subset=["hook", "patch"])
    assert len(both) == 2 * len(PRESSES)
    assert (both["hook"] == both["patch"]).all()


def test_peaks_are_beyond_the_cache_and_grow(tables):
    table = tables["memory"]
    assert (table["peak"] > table["bytes"]).all()
    hooked = table[table["mechanism"] != "patch"].set_index(["model", "context", "press"])["peak"]
    for press in (NO_PRESS, "SnapKVPress", "AdaKVPress", "ThinKPress"):
        assert hooked["deep", 256, press] > 1.8 * hooked["deep", 128, press]


def test_a_prefill_takes_as_much_beside_the_cache_at_any_depth(tables):
    bare = tables["memory"].query("press == @NO_PRESS and context == 256").set_index("model")
    beside = bare["peak"] - bare["bytes"]
    assert beside["deep"] == pytest.approx(beside["shallow"], rel=0.01)


def test_a_model_from_outside(tmp_path):
    model = build("gpt_neox")
    size = Size(contexts=(128,), presses=("KnormPress",), ratio=0.8)
    table = memory.measure_prefills({"neox": (model, size)}, SILENT)
    assert table["press"].tolist() == [NO_PRESS, "KnormPress", "KnormPress"]
    expected = int(128 * (1 - 0.8)) / (128 * (1 - 0.8))
    assert table["measured_over_predicted"].tolist() == pytest.approx([1, expected, expected])


# ---- what is told --------------------------------------------------------------------------------


def test_sentences_are_read_off_the_table(tables):
    table = tables["memory"].copy()
    first = table["model"] == "shallow"
    table.loc[first & (table["context"] == 256) & (table["press"] == NO_PRESS), "peak"] = 10 * 2**20
    table.loc[first & (table["context"] == 256) & (table["press"] == "ThinKPress"), "peak"] = 2**20
    assert "ThinK -9.0 MiB (frees 0.0 at 256 tokens)" in memory.sentence_on_peaks(table)
    table.loc[table["mechanism"] == "patch", "peak"] = 1
    table.loc[table["mechanism"] == "hook", "peak"] = 2
    assert (hook_over_patch(table) == 2).all()
    assert len(hook_over_patch(table)) == 2 * len(PRESSES)
    assert hook_over_patch(table[table["mechanism"] != "patch"]).empty
    *_, found = EXPERIMENT.findings(tables | {"memory": table})
    assert "peak is 2.000 to **2.000** times that with patches, over 8 prefills" in found.text
    table.loc[table["press"] == NO_PRESS, "peak"] = table["bytes"] + 3 * 2**20
    told = memory.sentence_on_depth(table)
    assert "256 tokens without a press takes 3.0 MiB with 2 layers and 3.0 MiB with 4" in told
    assert not memory.sentence_on_depth(table[first])
    assert "ThinK 1.000, KVzip" in memory.sentence_on_arithmetic(tables["memory"])


@pytest.mark.parametrize(("peaks", "verdict"), [([1.5, 0.5], "costs"), ([0.9, 0.5], "works")])
def test_whether_presses_lower_the_peak(tables, peaks, verdict):
    table = tables["memory"].query("press != @NO_PRESS").iloc[:2].assign(peak_over_bare=peaks)
    held, peak, *_ = EXPERIMENT.findings(tables | {"memory": table})
    assert peak.text.endswith(f"is 0.50 to **{max(peaks):.2f}** times that without one.")
    assert peak.verdict == verdict
    assert "times the bytes that arithmetic gives, over 2 prefills" in held.text


def test_summary_has_a_line_per_prefill_with_hooks(tables):
    lines = [line for line in EXPERIMENT.markdown(tables).splitlines() if line.startswith("| ")]
    hooked = tables["memory"]["mechanism"] != "patch"
    assert sum(" | SnapKV | " in line for line in lines) == 4
    assert len([line for line in lines if "-B" not in line]) >= hooked.sum()
    assert "| Llama-3.1-70B | 1,048,576 | 320.0 | 160.0 | 64.0 |" in lines


def test_figures_show_every_size(tables):
    drawn = EXPERIMENT.figures(tables)
    _, peak = drawn["memory"].axes
    assert len(peak.get_lines()) == 1 + len(PRESSES)
    assert peak.get_lines()[0].get_xdata().tolist() == [128, 256]
    (panel,) = drawn["memory_models"].axes
    dots = [line for line in panel.get_lines() if len(line.get_xdata()) == 1]
    assert len(dots) == len(tables["memory_models"])


# ---- command -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cli(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    models["shallow"].save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    arguments = ["memory", "--model", str(folder)]
    return lambda *more: CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "120"})


def test_command_writes_what_it_shows(cli, tmp_path):
    sizes = ["--context", "256", "--context", "128", "--press", "snapkv", "--ratio", "0.25"]
    result = cli(*sizes, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "tiny: one prefill; presses, installed by hooks, evict 25%" in result.output
    table = pd.read_csv(tmp_path / "memory.csv")
    assert table["context"].tolist() == [128] * 3 + [256] * 3
    assert table["bytes"].tolist() == [65536, 49152, 49152, 131072, 98304, 98304]
    assert len(pd.read_csv(tmp_path / "memory_models.csv")) == 36
    for name in ("memory", "memory_models"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "1"], "ratio"),
        (["--press", "SnapPress"], "there is no press 'SnapPress'"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_command_says_what_is_wrong(cli, options, message):
    result = cli(*options)
    assert result.exit_code == 2
    assert message in result.output
