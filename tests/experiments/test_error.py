"""Where an eviction hurts: what is measured, against what can be worked out by hand."""

import pandas as pd
import pytest
import torch
from transformers import DynamicCache

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.questions import error
from experiments.questions.error import EXPERIMENT
from experiments.testbed import masked
from experiments.testbed.families import FAMILIES, supported_implementations
from experiments.testbed.masked import Reader, Sample
from press_core import UnsupportedCacheError
from press_core.cache.caches import known
from press_core.cache.tokens import Kept
from tests.experiments.tiny import SILENT
from tests.support import PACKAGES, build, example_for, token_ids, unchanged

SAMPLE = Sample(token_ids(2, 60), token_ids(2, 3, seed=1))
LONG = Sample(token_ids(2, 160), token_ids(2, 3, seed=1))
NAMES = ["SnapKVPress", "AdaKVPress", "KeyRerotationPress", "CAMPress"]


def made(family="llama", **shape):
    return build(family, attn_implementation="eager", **shape)


def harm(model, name, ratio):
    """Rows of the heads, and of the logits, that both packages' press `name` brings about."""
    pair = [example_for(package, name, ratio, model) for package in PACKAGES]
    return masked.harm(Reader(model, SAMPLE), pair)


@pytest.fixture(scope="module")
def tables():
    model = made()
    with unchanged(model):
        found = error.tables_of(model, [LONG], NAMES, 0.5, SILENT)
    return {name: table.assign(model="tiny") for name, table in found.items()}


# ---- one sample ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["KnormPress", "AdaKVPress"])
def test_a_mask_on_the_full_cache_gives_the_logits_of_the_pruned_one(family, name):
    assert "eager" in supported_implementations(family)
    rows, of_logits = harm(made(family), name, 0.5)
    assert of_logits["unexplained"] < 1e-4
    assert of_logits["equal"]
    assert of_logits["logit_error"] > 1e-3
    assert len(rows) == sum(site.num_kv_heads for site in Reader(made(family), SAMPLE).sites)


def test_a_single_head_of_a_single_layer_tells_everything():
    """With one layer of one KV head, what it does alone is what comes of the eviction."""
    model = made(num_layers=1, num_heads=2, num_kv_heads=1)
    (row,), of_logits = harm(model, "KnormPress", 0.8)
    assert row["logit_error"] == pytest.approx(of_logits["logit_error"], rel=1e-4)
    assert row["kept"] == pytest.approx(11 / 60)  # int(60 * (1 - 0.8))
    reader = Reader(model, SAMPLE)
    (whole,), (pruned,) = reader.full.outputs, reader.pruned(hooks_impl.KnormPress(0.8))[0].outputs
    off = (pruned - whole).norm(dim=-1) / whole.norm(dim=-1)
    assert row["alone"] == pytest.approx(off.mean().item(), rel=1e-4)


def test_the_attention_lost_is_that_of_what_is_evicted():
    """Of the first layer by hand: weights of the bare model over all but the last tokens."""
    model = made()
    pair = [package.StreamingLLMPress(0.5, n_sink=0) for package in PACKAGES]
    rows, _ = masked.harm(Reader(model, SAMPLE), pair)
    ids = torch.cat(SAMPLE, dim=1)
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0]
    lost = weights[:, :, -3:, :30].sum(dim=-1)  # (B, H, q), two query heads per KV head
    assert rows[0]["mass_lost"] == pytest.approx(lost[:, :2].mean().item(), rel=1e-4)
    assert rows[1]["mass_lost"] == pytest.approx(lost[:, 2:].mean().item(), rel=1e-4)


def test_a_head_that_keeps_all_does_no_harm():
    """DuoAttention evicts from some heads and leaves the others whole."""
    rows, _ = harm(made(), "DuoAttentionPress", 0.4)
    untouched = [row for row in rows if row["kept"] == 1]
    assert 0 < len(untouched) < len(rows)
    for row in rows:
        harmed = row["alone"] > 0 and row["mass_lost"] > 0 and row["logit_error"] > 0
        assert harmed == (row["kept"] < 1)


def test_rows_that_keep_different_numbers_of_tokens():
    """One row has evicted, though the layer has as many slots as the whole one beside it."""
    cache = DynamicCache()
    cache.update(torch.zeros(2, 2, 8, 16), torch.zeros(2, 2, 8, 16), 0)
    assert masked.kept_in(cache)[0].all()
    cache.layers[0] = layer = known(cache, 0)
    positions = torch.stack([torch.arange(8), torch.tensor([-1] * 5 + [0, 6, 7])])
    layer.kept = Kept(positions[:, None].expand(2, 2, 8).int(), 8, 8)
    kept = masked.kept_in(cache)[0]
    assert kept.sum(dim=-1).tolist() == [[8, 8], [3, 3]]
    assert kept[1, 0].nonzero().flatten().tolist() == [0, 6, 7]
    layer.kept = Kept(None, 4, 8)
    with pytest.raises(UnsupportedCacheError):
        masked.kept_in(cache)


def test_other_bits_are_noticed():
    pair = [hooks_impl.KnormPress(0.5), patch_impl.KnormPress(0.6)]
    assert not masked.harm(Reader(made(), SAMPLE), pair)[1]["equal"]


# ---- the tables ----------------------------------------------------------------------------------


def test_what_the_tables_hold(tables):
    logits = tables["error_logits"].set_index("press")
    assert list(logits.index) == NAMES[:3]  # CAMPress evicts while decoding only
    assert len(tables["error"]) == 3 * 2 * 2
    assert logits["equal"].all()
    assert logits.loc["SnapKVPress", "unexplained"] < 1e-4
    assert logits.loc["KeyRerotationPress", "unexplained"] > error.EXPLAINED
    assert set(error.explained(tables)["press"]) == {"SnapKVPress", "AdaKVPress"}


def test_presses_that_evict_another_share_or_err_as_another_does_are_left_out(tables):
    snap, ada, _ = (rows for _, rows in tables["error"].groupby("press", sort=False))
    changed = pd.concat([snap.assign(press="PrefillDecodingPress"), snap, ada.assign(kept=0.9)])
    logits = tables["error_logits"].assign(press=changed["press"].unique(), unexplained=0)
    found = error.explained({"error": changed, "error_logits": logits})
    assert set(found["press"]) == {"SnapKVPress"}


def test_findings_are_read_off_the_tables(tables):
    shown = tables["error"].query("press == 'SnapKVPress'").copy()
    shown["logit_error"] = [3.0, 0.0, 0.0, 1.0]
    shown["mass_lost"], shown["alone"] = [0.4, 0.1, 0.2, 0.3], [0.8, 0.2, 0.4, 0.6]
    found = EXPERIMENT.findings(tables | {"error": shown})
    assert [finding.number for finding in found] == [75, 1, 0]
    unlike = tables["error_logits"].assign(equal=[False, True, True])
    *_, equal = EXPERIMENT.findings(tables | {"error_logits": unlike})
    assert (equal.number, equal.verdict) == (1, "breaks")


def test_the_table_says_what_the_mask_explains_and_the_heat_map_shows_it(tables):
    text = EXPERIMENT.markdown(tables)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert sorted(line.split(" | ")[-1] for line in lines[1:]) == ["no |", "yes |", "yes |"]
    panels = [panel for panel in EXPERIMENT.figures(tables)["error"].axes if panel.texts]
    assert [panel.get_title("left") for panel in panels] == ["SnapKV", "AdaKV"]


def test_nothing_to_tell():
    with pytest.raises(UserError, match=r"CAM .*prefill"):
        error.tables_of(made(), [SAMPLE], ["CAMPress"], 0.5, SILENT)
