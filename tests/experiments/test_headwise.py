"""Head-wise against uniform budgets: what is compared, and what is read off the tables."""

import numpy as np
import pandas as pd
import pytest
import torch

from experiments import UserError
from experiments.loading import load_model
from experiments.questions.headwise import EXPERIMENT, Options, Part, budgets
from experiments.questions.headwise.budgets import ALL, ALONE, HEADWISE, UNIFORM, differences, pairs
from experiments.questions.headwise.four_ways import OTHER
from experiments.testbed.facts import VOCABULARY, Task
from press_core import kept_lengths
from press_core.budget import n_kept
from press_core.learned.measured import HeadScores
from tests.experiments.tiny import SILENT, saved
from tests.support import build, filled

SMALL = Task(context=96, facts=4, samples=3)
RATIOS = (0.5, 0.8)
N_PAIRS = 6


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    tables = measured(Part.BUDGETS, ratio=RATIOS, **vars(SMALL))
    folder = saved(tmp_path_factory.mktemp("models") / "tiny")
    few = {"contexts": (128, 256), "ratio": RATIOS, "rounds": 2}
    tables |= measured(Part.DECODING, model=str(folder), **few)
    return tables | measured(Part.CONDITIONS, family=("llama",))


def measured(part, **options):
    return EXPERIMENT.measure(Options(part=(part,), **options), SILENT)


def finding(name, **tables):
    (found,) = (one for one in EXPERIMENT.findings(tables) if one.name == name)
    return found


# ---- what is compared ----------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.7, 0.9, 0.96])
@pytest.mark.parametrize(("layers", "heads", "length"), [(4, 4, 513), (2, 2, 200), (32, 8, 4096)])
def test_streaming_heads_evict_the_share_asked_for(ratio, layers, heads, length):
    scores = HeadScores(torch.rand(layers, heads, generator=torch.Generator().manual_seed(0)))
    press = budgets.streaming(ratio, scores, length)
    kept = press.sink_size + press.recent_size
    evicted = press.head_compression_ratio * (1 - kept / length)
    possible = min(ratio, 1 - 16 / length)  # no head keeps less than 16 tokens
    assert evicted == pytest.approx(possible, abs=1 / length)
    assert kept >= 16


def test_streaming_leaves_out_heads_that_no_press_works_on():
    scores = torch.rand(4, 2)
    scores[::2] = float("inf")
    press = budgets.streaming(0.5, HeadScores(scores), 100)
    assert press.head_compression_ratio * 4 == pytest.approx(3)  # two heads could not give up 0.5


def test_both_presses_of_a_pair_keep_as_many_tokens():
    model, _ = load_model("facts-llama")
    (batch,), found = SMALL.batches(), pairs(model, SMALL)
    assert len(found) == N_PAIRS
    for _, *makers in found.values():
        caches = [filled(model, make(0.7), batch.context_ids) for make in makers]
        # of every layer, context and head
        uniform, headwise = (torch.stack(kept_lengths(cache)) / 97 for cache in caches)
        assert uniform.unique().numel() == 1
        assert headwise.unique().numel() > 1
        assert float(uniform.mean()) == pytest.approx(n_kept(97, 0.7) / 97)
        assert float(headwise.mean()) == pytest.approx(0.3, abs=0.01)


def test_scores_of_heads_are_measured_or_taken_from_beside_the_model(tmp_path):
    model = build("llama")  # not from a folder, so that nothing lies beside it
    model.resize_token_embeddings(len(VOCABULARY), mean_resizing=False)
    scores = pairs(model, SMALL)["DuoAttention"][-1](0.5).head_scores.scores
    assert scores.shape == (2, 2)
    assert ((scores >= 0) & (scores <= 1)).all()
    known = HeadScores(torch.arange(4.0).view(2, 2))
    known.save(tmp_path)
    model.config.name_or_path = str(tmp_path)
    taken = pairs(model, SMALL)["DuoAttention"][-1](0.5).head_scores.scores
    assert torch.equal(taken, known.scores)


# ---- differences ---------------------------------------------------------------------------------


def test_differences_are_taken_context_by_context():
    uniform = pd.Series([0.0, 1.0] * 4)  # shares of right answers
    headwise_ = pd.Series([0.25, 1.0] * 4)  # one more of the hard ones
    right = {("a", 0.5, UNIFORM): uniform, ("a", 0.5, HEADWISE): headwise_}
    right |= {("b", 0.5, UNIFORM): uniform, ("b", 0.5, HEADWISE): uniform}
    right |= {(ALONE, 0.5, UNIFORM): uniform, (ALONE, 0.5, HEADWISE): 0 * uniform}
    table = differences(right)
    at, mean = table[table["ratio"] == 0.5], table[table["ratio"].isna()]
    assert at["pair"].to_list() == mean["pair"].to_list() == ["a", "b", ALONE, ALL]
    assert at["difference"].to_list() == mean["difference"].to_list()  # of a single ratio
    table = at.set_index("pair")
    assert table.loc["a", "difference"] == pytest.approx(0.125)
    assert table.loc["a", "contexts"] == 8
    # Between contexts accuracy differs by 1, but the difference by 0.25 alone.
    assert 0 < table.loc["a", "low"] < 0.125 < table.loc["a", "high"] < 0.25
    assert table.loc["b", "difference"] == 0
    assert table.loc["b", ["low", "high"]].isna().all()  # of contexts that are all alike
    assert table.loc[ALL, "difference"] == pytest.approx(0.0625)


def test_the_mean_over_ratios_is_taken_context_by_context_too():
    one, other = pd.Series([1.0, 0.0] * 4), pd.Series([0.0, 1.0] * 4)
    right = {("a", 0.5, UNIFORM): other, ("a", 0.5, HEADWISE): one}
    right |= {("a", 0.8, UNIFORM): one, ("a", 0.8, HEADWISE): other}
    table = differences(right)
    assert (table.loc[table["ratio"].notna(), "high"] > 0.4).all()
    # What one ratio gains in each context the other loses.
    assert (table.loc[table["ratio"].isna(), "difference"] == 0).all()
    assert table.loc[table["ratio"].isna(), "high"].isna().all()


# ---- tables --------------------------------------------------------------------------------------


def test_a_row_per_press_and_ratio(tables):
    accuracy = tables["headwise_accuracy"]
    assert len(accuracy) == 1 + 2 * N_PAIRS * len(RATIOS)
    by = accuracy.set_index(["pair", "budgets", "ratio"], verify_integrity=True)["accuracy"]
    assert set(accuracy["contexts"]) == {3}
    assert accuracy["low"].isna().all()  # of three contexts
    assert accuracy["accuracy"].iloc[0] > 0.9  # without a press
    single = tables["headwise_difference"].query("pair != @ALL and ratio.notna()")
    assert len(single) == N_PAIRS * len(RATIOS)
    for row in single.to_dict("records"):
        pair, ratio = row["pair"], row["ratio"]
        expected = by[pair, HEADWISE, ratio] - by[pair, UNIFORM, ratio]
        assert row["difference"] == pytest.approx(expected)


def test_sliding_layers_are_not_timed(tmp_path):
    folder = str(saved(tmp_path, "gemma3_text"))
    with pytest.raises(UserError, match="sliding window"):
        measured(Part.DECODING, model=folder, contexts=(64,), ratio=(0.5,), rounds=1)
    assert Options(model=folder).parts == (Part.DECODING, Part.CONDITIONS)


# ---- what is found -------------------------------------------------------------------------------


@pytest.mark.parametrize(("shift", "verdict"), [(0.3, "works"), (-0.3, "costs"), (0.0, None)])
def test_whether_budgets_helped(tables, shift, verdict):
    table = tables["headwise_difference"].copy()
    table[["difference", "low", "high"]] = shift + np.array([0.0, -0.1, 0.1])
    table.loc[(table["pair"] == "DuoAttention") & table["ratio"].isna(), "difference"] = -0.5
    found = finding("worth", **tables | {"headwise_difference": table})
    assert f"on facts-llama: **{100 * shift:+.1f}** points [" in found.text
    assert ALONE not in found.text
    cited = finding("duoattention", **tables | {"headwise_difference": table})
    assert "DuoAttention minus StreamingLLM: **-50.0** points" in cited.text
    assert found.verdict == verdict


def test_whether_a_patch_is_needed(tables):
    table = tables["headwise_conditions"]
    broken = table.copy()
    broken.loc[(table["condition"] == "mask by hook").idxmax(), "outcome"] = OTHER
    for changed, said, right, verdict in (
        (table, "needs no patch", 6, "works"),
        (table[table["question"] == 3], "needs no patch", 3, "works"),
        (broken, "needs a patch", 5, "breaks"),
    ):
        found = finding("patching", headwise_conditions=changed)
        assert said in found.text
        assert (found.number, found.verdict) == (right, verdict)


def test_what_ragged_storage_frees_and_takes(tables):
    table = tables["headwise_decoding"]
    longest = table.query("context == 256 and ratio == 0.8 and condition == 'ragged'")
    (row,) = longest.to_dict("records")
    found = finding("freeing", **tables)
    assert found.number == round(row["bytes"] / row["full_bytes"], 2)
    assert found.text.endswith("a mask set by a hook, 1.00.")
    assert found.verdict == "works"
    freed = table.assign(bytes=table["bytes"] // 2)
    assert finding("freeing", headwise_decoding=freed).text.endswith("by a hook, 0.50.")
    kept = table.assign(bytes=table["full_bytes"])
    assert finding("freeing", headwise_decoding=kept).verdict == "breaks"
