"""Where an eviction hurts: what is measured, against what can be worked out by hand."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.cli import app
from experiments.framework.command import progress_bar
from experiments.questions import error
from experiments.questions.error import EXPERIMENT, Sample
from experiments.testbed.families import FAMILIES, supported_implementations
from press_core import attention_sites
from press_core.cache.caches import known
from press_core.cache.tokens import Kept
from tests.support import build, example_for, snapshot, token_ids

SILENT = progress_bar(disable=True)
SAMPLE = Sample(token_ids(2, 60), token_ids(2, 3, seed=1))
LONG = Sample(token_ids(2, 160), token_ids(2, 3, seed=1))


def made(family="llama", **shape):
    return build(family, attn_implementation="eager", **shape)


def whole_of(model, sites):
    return error._whole(model, sites, SAMPLE)


@pytest.fixture(scope="module")
def tables():
    model = made()
    before = snapshot(model)
    names = ["SnapKVPress", "AdaKVPress", "KeyRerotationPress", "CAMPress"]
    found = error.tables_of(model, [LONG], names, (0.5, 0.8), SILENT, model_name="tiny")
    assert snapshot(model) == before
    return found


# ---- one sample ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["KnormPress", "AdaKVPress"])
def test_a_mask_on_the_full_cache_gives_the_logits_of_the_pruned_one(family, name):
    assert "eager" in supported_implementations(family)
    model = made(family)
    sites = attention_sites(model)
    pair = [example_for(package, name, 0.5, model) for package in (hooks_impl, patch_impl)]
    rows, of_logits = error.rows_of_sample(model, sites, whole_of(model, sites), pair)
    assert of_logits["unexplained"] < 1e-4
    assert of_logits["equal"]
    assert of_logits["logit_error"] > 1e-3
    assert len(rows) == sum(site.num_kv_heads for site in sites)


def test_a_single_head_of_a_single_layer_tells_everything():
    """With one layer of one KV head, what it does alone is what comes of the eviction."""
    model = made(num_layers=1, num_heads=2, num_kv_heads=1)
    sites = attention_sites(model)
    pair = [package.KnormPress(0.8) for package in (hooks_impl, patch_impl)]
    (row,), of_logits = error.rows_of_sample(model, sites, whole_of(model, sites), pair)
    assert row["alone"] == pytest.approx(row["output_error"], rel=1e-4)
    assert row["logit_error"] == pytest.approx(of_logits["logit_error"], rel=1e-4)
    assert row["kept"] == pytest.approx(11 / 60)  # int(60 * (1 - 0.8))


def test_the_attention_lost_is_that_of_what_is_evicted():
    """Of the first layer by hand: weights of the bare model over all but the last tokens."""
    model = made()
    sites = attention_sites(model)
    pair = [package.StreamingLLMPress(0.5, n_sink=0) for package in (hooks_impl, patch_impl)]
    rows, _ = error.rows_of_sample(model, sites, whole_of(model, sites), pair)
    ids = torch.cat(SAMPLE, dim=1)
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0]
    lost = weights[:, :, -3:, :30].sum(dim=-1)  # (B, H, q), two query heads per KV head
    assert rows[0]["mass_lost"] == pytest.approx(lost[:, :2].mean().item(), rel=1e-4)
    assert rows[1]["mass_lost"] == pytest.approx(lost[:, 2:].mean().item(), rel=1e-4)


def test_a_head_that_keeps_all_does_no_harm():
    """DuoAttention evicts from some heads and leaves the others whole."""
    model = made()
    sites = attention_sites(model)
    pair = [
        example_for(package, "DuoAttentionPress", 0.4, model)
        for package in (hooks_impl, patch_impl)
    ]
    rows, _ = error.rows_of_sample(model, sites, whole_of(model, sites), pair)
    untouched = [row for row in rows if row["kept"] == 1]
    assert 0 < len(untouched) < len(rows)
    for row in rows:
        harmed = row["alone"] > 0 and row["mass_lost"] > 0 and row["logit_error"] > 0
        assert harmed == (row["kept"] < 1)


def test_rows_that_keep_different_numbers_of_tokens():
    """One row has evicted, though the layer has as many slots as the whole one beside it."""
    cache, context = DynamicCache(), torch.zeros(2, 8)
    cache.update(torch.zeros(2, 2, 8, 16), torch.zeros(2, 2, 8, 16), 0)
    assert error.kept_in(cache, context)[0].all()
    cache.layers[0] = layer = known(cache, 0)
    positions = torch.stack([torch.arange(8), torch.tensor([-1] * 5 + [0, 6, 7])])
    layer.kept = Kept(positions[:, None].expand(2, 2, 8).int(), 8, 8)
    kept = error.kept_in(cache, context)[0]
    assert kept.sum(dim=-1).tolist() == [[8, 8], [3, 3]]
    assert kept[1, 0].nonzero().flatten().tolist() == [0, 6, 7]
    layer.kept = Kept(None, 4, 8)
    assert error.kept_in(cache, context) is None


def test_other_bits_are_noticed():
    model = made()
    sites = attention_sites(model)
    pair = [hooks_impl.KnormPress(0.5), patch_impl.KnormPress(0.6)]
    _, of_logits = error.rows_of_sample(model, sites, whole_of(model, sites), pair)
    assert not of_logits["equal"]


# ---- the tables ----------------------------------------------------------------------------------


def test_what_the_tables_hold(tables):
    logits = tables["error_logits"].set_index(["press", "ratio"])
    assert len(logits) == 3 * 2  # CAMPress evicts while decoding only
    assert len(tables["error"]) == 3 * 2 * 2 * 2
    assert logits["equal"].all()
    assert (logits.loc["SnapKVPress", "unexplained"] < 1e-4).all()
    assert logits.loc[("KeyRerotationPress", 0.5), "unexplained"] > error.EXPLAINED
    assert set(error.explained(tables)["press"]) == {"SnapKVPress", "AdaKVPress"}
    lost = tables["error"].groupby(["press", "ratio"])["mass_lost"].mean()
    assert (lost.xs(0.8, level="ratio") > lost.xs(0.5, level="ratio")).all()


def test_findings_are_read_off_the_tables(tables):
    shown = tables["error"].query("press == 'SnapKVPress' and ratio == 0.8").copy()
    shown["logit_error"] = [3.0, 0.0, 0.0, 1.0]
    shown["mass_lost"], shown["alone"] = [0.4, 0.1, 0.2, 0.3], [0.8, 0.2, 0.4, 0.6]
    where, mass, equal = EXPERIMENT.findings(tables | {"error": shown})
    assert "With 80% evicted, **75%** of the error" in where.text
    assert "a quarter of the 4 heads" in where.text
    assert "correlation is **1.00**, over 4 heads" in mass.text
    assert "in **0** of 6 presses and ratios" in equal.text
    unlike = tables["error_logits"].assign(equal=[False, *[True] * 5])
    *_, equal = EXPERIMENT.findings(tables | {"error_logits": unlike})
    assert "in **1** of 6" in equal.text
    assert equal.verdict == "breaks"


def test_a_table_and_a_heat_map(tables):
    text = EXPERIMENT.markdown(tables)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 6
    assert sum(line.endswith("| no |") for line in lines) == 1  # 80% leaves the last 32 in a row
    assert "KeyRerotation change what they keep" in text
    panels = [
        a for a in EXPERIMENT.figures(tables)["error"].axes if a.images and a.get_title("left")
    ]
    assert [panel.get_title("left") for panel in panels] == ["SnapKV", "AdaKV"]
    own = tables["error"].query("press == 'SnapKVPress' and ratio == 0.8")
    drawn = panels[0].images[0].get_array()
    assert drawn.shape == (2, 2)
    assert drawn.flatten().tolist() == pytest.approx(own["alone"].tolist())


def test_nothing_to_tell():
    with pytest.raises(UserError, match="none of CAM evicts in the prefill"):
        error.tables_of(made(), [SAMPLE], ["CAMPress"], (0.5,), SILENT, model_name="tiny")


# ---- command -------------------------------------------------------------------------------------


def test_command(tmp_path):
    sizes = ["--press", "snapkv,knorm", "--ratio", "0.8", "--samples", "2", "--context", "128"]
    result = CliRunner().invoke(
        app, ["error", *sizes, "--output", str(tmp_path)], env={"COLUMNS": "120"}
    )
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "error.csv")
    assert table.groupby("press").size().to_dict() == {"KnormPress": 16, "SnapKVPress": 16}
    assert pd.read_csv(tmp_path / "error_logits.csv")["equal"].all()
    assert (tmp_path / "error.svg").stat().st_size > 3_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "0.5,1"], "1.0 is not above 0 and below 1"),
        (["--ratio", "half"], "cannot read 'half'"),
        (["--press", "Snap"], "there is no press 'Snap'"),
        (["--context", "40", "--facts", "30"], "--context, --facts"),
    ],
)
def test_command_says_what_is_wrong(options, message):
    result = CliRunner().invoke(app, ["error", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output
