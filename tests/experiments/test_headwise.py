"""Head-wise against uniform budgets: what is compared, and what is read off the tables."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hooks_impl
from experiments import UserError
from experiments.cli import app
from experiments.framework.command import progress_bar
from experiments.framework.plots import NO_PRESS
from experiments.loading import load_model
from experiments.questions.headwise import (
    EXPERIMENT,
    Options,
    Part,
    find_freeing,
    find_patching,
    find_shapes,
    find_worth,
    shapes,
)
from experiments.questions.headwise.asked import Asked, AskedInWords, asked
from experiments.questions.headwise.budgets import (
    ALL,
    HEADWISE,
    N_PAIRS,
    UNIFORM,
    EvenKVzipPress,
    differences,
    head_scores,
    held,
    pairs,
    streaming,
)
from experiments.questions.headwise.trials import ERROR, OTHER, SAME
from experiments.testbed.asking import Task
from experiments.testbed.decoding import FULL
from experiments.testbed.facts import VOCABULARY, build_tokenizer
from experiments.testbed.variants import VARIANTS
from press_core.budget import n_kept
from press_core.cache.recent import AHEAD
from press_core.learned.duo_attention import HeadScores
from tests.support import build

SMALL = Task(context=96, facts=4, samples=3)
RATIOS = (0.5, 0.8)


@pytest.fixture(scope="module")
def facts_llama():
    return load_model("facts-llama")


@pytest.fixture(scope="module")
def tables(facts_llama, tmp_path_factory):
    asked_for = {"samples": SMALL.samples, "context": SMALL.context, "facts": SMALL.facts}
    tables = measured(Part.BUDGETS, ratio=RATIOS, **asked_for)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build("llama").save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    few = {"contexts": (128, 256), "ratio": RATIOS, "rounds": 2}
    tables |= measured(Part.DECODING, model=str(folder), **few)
    tables |= measured(Part.CONDITIONS, family=("llama",))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shapes, "MOST_BYTES", 2**21)  # which leaves out those of 8 rows
        return tables | measured(Part.SHAPES, contexts=(64,), rounds=2)


def measured(part, **options):
    return EXPERIMENT.measure(Options(part=(part,), **options), progress_bar(disable=True))


# ---- what is compared ----------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.7, 0.9, 0.96])
@pytest.mark.parametrize(("layers", "heads", "length"), [(4, 4, 513), (2, 2, 200), (32, 8, 4096)])
def test_streaming_heads_evict_the_share_asked_for(ratio, layers, heads, length):
    scores = HeadScores(torch.rand(layers, heads, generator=torch.Generator().manual_seed(0)))
    press = streaming(ratio, scores, length)
    kept = press.sink_size + press.recent_size
    evicted = press.head_compression_ratio * (1 - kept / length)
    possible = min(ratio, 1 - 16 / length)  # no head keeps less than 16 tokens
    assert evicted == pytest.approx(possible, abs=1 / length)
    assert kept >= 16


def test_streaming_leaves_out_heads_that_no_press_works_on():
    scores = torch.rand(4, 2)
    scores[::2] = float("inf")
    press = streaming(0.5, HeadScores(scores), 100)
    assert press.head_compression_ratio * 4 == pytest.approx(3)  # two heads could not give up 0.5


def test_uniform_kvzip_keeps_the_best_of_each_head_and_the_sinks():
    scores = torch.rand(1, 2, 20)
    press = EvenKVzipPress(0.75, n_sink=2)
    chosen = press.choose({3: scores})[3]
    assert torch.equal(chosen.sum(dim=-1), torch.tensor([5, 5]))
    assert chosen[:, :2].all()
    best = scores[0, :, 2:].topk(3).indices + 2
    assert chosen.gather(1, best).all()


def test_both_presses_of_a_pair_hold_as_many_tokens(facts_llama):
    model, tokenizer = facts_llama
    task = asked(tokenizer, SMALL)
    contexts = task.contexts(task.batches[0])
    found = pairs(model, task)
    assert len(found) == N_PAIRS == len({pair.name for pair in found})
    spread = {}
    for pair in found:
        presses = {UNIFORM: pair.uniform(0.7), HEADWISE: pair.headwise(0.7)}
        left = {name: held(model, press, contexts) for name, press in presses.items()}
        assert float(left[UNIFORM].shares.mean()) == pytest.approx(n_kept(97, 0.7) / 97)
        assert left[UNIFORM].shares.unique().numel() == 1
        assert float(left[HEADWISE].shares.mean()) == pytest.approx(0.3, abs=0.01)
        assert left[HEADWISE].shares.unique().numel() > 1
        fewer, more = sorted(one.bytes for one in left.values())
        spare = AHEAD / 97 * held(model, None, contexts).bytes  # where heads differ
        assert more <= 1.03 * fewer + spare
        of_layers = left[HEADWISE].shares.mean(dim=1)
        spread[pair.name] = float(of_layers.max() - of_layers.min())
    assert spread["AdaKV(SnapKV)"] < 1e-6
    assert spread["KVzip"] > 0.01  # whose layers share the budget


def test_what_is_held_is_weighed_whole(facts_llama):
    model, _ = facts_llama
    ids = torch.randint(4, 600, (2, 50))
    full = held(model, None, [ids, ids])
    assert (full.shares == 1).all()
    assert full.shares.shape == (4, 4)
    assert full.bytes == 2 * 2 * (2 * 50) * 4 * 4 * 16 * 4  # twice keys and values in float32


def random_model(width=32):
    """Not from a folder, so that nothing lies beside it."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def test_heads_that_nobody_measured_are_measured():
    task = asked(build_tokenizer(), SMALL)
    scores = head_scores(random_model(), task).scores
    assert scores.shape == (2, 2)
    assert ((scores >= 0) & (scores <= 1)).all()
    for batch, other in zip(task.batches, task.others(), strict=False):
        assert not torch.equal(batch.context_ids, other.context_ids[: len(batch.context_ids)])


def test_scores_beside_the_model_are_taken(facts_llama, monkeypatch, tmp_path):
    model, tokenizer = facts_llama
    known = HeadScores(torch.arange(16.0).view(4, 4))
    known.save(tmp_path)
    monkeypatch.setattr(model.config, "name_or_path", str(tmp_path))
    assert torch.equal(head_scores(model, asked(tokenizer, SMALL)).scores, known.scores)


# ---- asking in words -----------------------------------------------------------------------------


def test_a_vocabulary_of_its_own_is_asked_in_words():
    tokenizer = build_tokenizer()
    assert type(asked(tokenizer, SMALL)) is Asked
    tokenizer.add_tokens(["zebra"])
    assert type(asked(tokenizer, SMALL)) is AskedInWords


@pytest.mark.parametrize("press", [None, hooks_impl.AdaKVPress(hooks_impl.KeyDiffPress(0.7))])
def test_words_are_answered_as_tokens_are(facts_llama, press):
    model, tokenizer = facts_llama
    in_words, in_tokens = AskedInWords(SMALL, tokenizer), Asked(SMALL)
    (batch,) = in_tokens.batches
    assert in_words.length == in_tokens.length == 97
    assert torch.equal(torch.cat(in_words.contexts(batch)), batch.context_ids)
    right = in_tokens.right(model, press, batch)
    assert torch.equal(in_words.right(model, press, batch), right)
    assert right.float().mean() > (0.9 if press is None else 0.1)


def test_every_token_of_an_answer_has_to_be_right(facts_llama, monkeypatch):
    model, tokenizer = facts_llama
    task = AskedInWords(SMALL, tokenizer)
    (batch,) = task.batches
    own = task._ids

    def two_tokens(words, start=False):
        ids = own(words, start)
        return torch.cat((ids, ids), dim=1) if ids.shape[1] == 1 else ids  # "tea tea"

    monkeypatch.setattr(task, "_ids", two_tokens)
    assert not task.right(model, None, batch).any()


# ---- differences ---------------------------------------------------------------------------------


def test_differences_are_taken_context_by_context():
    hard, easy = [False] * 4, [True] * 4
    uniform = torch.tensor([hard, easy] * 4)
    headwise_ = uniform.clone()
    headwise_[:, 0] = True  # one more of the hard ones: the same in each pair of contexts
    right = {("a", 0.5, UNIFORM): uniform, ("a", 0.5, HEADWISE): headwise_}
    right |= {("b", 0.5, UNIFORM): uniform, ("b", 0.5, HEADWISE): uniform}
    table = differences(right)
    at, mean = table[table["ratio"] == 0.5], table[table["ratio"].isna()]
    assert at["pair"].to_list() == mean["pair"].to_list() == ["a", "b", ALL]
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
    truth = torch.tensor([[True], [False]] * 4)
    right = {("a", 0.5, UNIFORM): ~truth, ("a", 0.5, HEADWISE): truth}
    right |= {("a", 0.8, UNIFORM): truth, ("a", 0.8, HEADWISE): ~truth}
    table = differences(right)
    assert (table.loc[table["ratio"].notna(), "high"] > 0.4).all()
    # What one ratio gains in each context the other loses.
    assert (table.loc[table["ratio"].isna(), "difference"] == 0).all()
    assert table.loc[table["ratio"].isna(), "high"].isna().all()


# ---- tables --------------------------------------------------------------------------------------


def test_a_row_per_press_and_ratio(tables):
    accuracy = tables["headwise_accuracy"]
    assert len(accuracy) == 1 + 2 * N_PAIRS * len(RATIOS)
    assert not accuracy.duplicated(["pair", "budgets", "ratio"]).any()
    assert set(accuracy["answers"]) == {12}
    assert set(accuracy["contexts"]) == {3}
    assert accuracy["accuracy"].between(0, 1).all()
    assert accuracy["low"].isna().all()  # of three contexts
    bare = accuracy[accuracy["press"] == NO_PRESS].iloc[0]
    assert (bare["evicted"], bare["bytes"]) == (0, 1)
    pressed = accuracy[accuracy["press"] != NO_PRESS]
    assert (pressed["bytes"] <= (1 - pressed["ratio"]) * 1.03 + AHEAD / 97).all()
    assert np.allclose(pressed["evicted"], pressed["ratio"], atol=0.011)


def test_differences_are_those_of_the_accuracies(tables):
    by = tables["headwise_accuracy"].set_index(["pair", "budgets", "ratio"])["accuracy"]
    single = tables["headwise_difference"].query("pair != @ALL and ratio.notna()")
    assert len(single) == N_PAIRS * len(RATIOS)
    for row in single.to_dict("records"):
        pair, ratio = row["pair"], row["ratio"]
        expected = by[pair, HEADWISE, ratio] - by[pair, UNIFORM, ratio]
        assert row["difference"] == pytest.approx(expected)


def test_every_context_and_shape_is_timed(tables):
    decoding, of_shapes = tables["headwise_decoding"], tables["headwise_shapes"]
    assert set(decoding["model"]) == {"tiny"}
    assert decoding.groupby("context").size().to_dict() == {128: 11, 256: 11}
    assert of_shapes["against"].tolist() == ["uniform", "full"] * 2
    assert (of_shapes["time"] > 0).all()


def test_sliding_layers_are_not_timed(tmp_path):
    build("gemma3_text").save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="sliding window"):
        measured(Part.DECODING, model=str(tmp_path), contexts=(64,), ratio=(0.5,), rounds=1)


# ---- what is found -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shift", "said", "verdict"),
    [
        (0.3, "helped", "works"),
        (-0.3, "cost answers", "costs"),
        (0.0, "made no difference that could be shown", None),
    ],
)
def test_whether_budgets_helped(tables, shift, said, verdict):
    table = tables["headwise_difference"].copy()
    table[["difference", "low", "high"]] = shift + np.array([0.0, -0.1, 0.1])
    found = find_worth(tables | {"headwise_difference": table})
    assert found.text.startswith(f"Head-wise budgets {said} on facts-llama")
    assert f"**{100 * shift:+.1f}** points [" in found.text
    assert found.verdict == verdict


def test_whether_a_patch_is_needed(tables):
    table = tables["headwise_conditions"]
    broken = table.copy()
    broken.loc[(table["condition"] == "mask by hook").idxmax(), "outcome"] = OTHER
    for changed, said, right, verdict in (
        (table, "needs no patch", "**6** of 6 trials", "works"),
        (table[table["question"] == 3], "needs no patch", "**3** of 3", "works"),
        (broken, "needs a patch", "**5** of 6", "breaks"),
        (table.assign(registry=True), "needs a patch", "**6** of 6", "breaks"),
    ):
        found = find_patching({"headwise_conditions": changed})
        assert said in found.text
        assert right in found.text
        assert found.verdict == verdict


def test_whether_memory_is_freed(tables):
    table = tables["headwise_decoding"]
    found = find_freeing(tables)
    assert "With 80% evicted head by head, ragged storage" in found.text
    assert found.text.endswith("a mask set by a hook, 1.00.")
    assert found.verdict == "works"
    row = table[(table["context"] == 256) & (table["ratio"] == 0.8)].set_index("condition")
    held = row.loc["ragged", "bytes"] / row.loc["ragged", "full_bytes"]
    assert f"holds **{held:.2f}** of" in found.text
    freed = {"headwise_decoding": table.assign(bytes=table["bytes"] // 2)}
    assert find_freeing(freed).text.endswith("by a hook, 0.50.")
    kept = {"headwise_decoding": table.assign(bytes=table["full_bytes"])}
    assert find_freeing(kept).verdict == "breaks"


def test_from_which_size_on_ragged_heads_are_quicker():
    rows = [(8192, 1, 0.9), (64, 8, 0.9), (8192, 1, 1.1), (64, 1, 0.9), (64, 1, 1.1)]
    table = pd.DataFrame(rows, columns=["context", "batch", "high"])
    table = table.assign(kv_heads=4, against="uniform")
    full = table.assign(against="full", high=0.5)
    found = find_shapes({"headwise_shapes": pd.concat([table, full])})
    assert "in **2** of 3 cases, below that in 1 of 2" in found.text


def test_every_table_is_shown(tables):
    difference, decoding, conditions, of_shapes = EXPERIMENT.views(tables)
    names = [*dict.fromkeys(tables["headwise_difference"]["pair"])]
    assert [row[0] for row in difference.rows] == names
    assert list(difference.head[1:]) == ["50% evicted", "80% evicted", "mean"]
    caches = [f"{name}, {r} evicted" for r in ("50%", "80%") for name in ("uniform", *VARIANTS)]
    assert [row[0] for row in decoding.rows] == caches
    assert list(decoding.head[1:]) == ["bytes", "128 tokens", "256 tokens"]
    rows = {tuple(row[:2]): row[2:] for row in conditions.rows}
    assert rows["llama, sdpa", "3 tokens"] == [SAME] * 4
    assert rows["llama, sdpa", "20 tokens"] == [ERROR, SAME, SAME, SAME]
    assert rows["frees memory", ""] == ["no", "no", "no", "yes"]
    assert rows["touches", ""] == [*["forwards, registry"] * 2, "hooks", "forwards, registry"]
    assert [row[:3] for row in of_shapes.rows] == [[1, "4x2x64", 64], [1, "8x4x128", 64]]


# ---- figures and command -------------------------------------------------------------------------


def test_figures_show_what_the_tables_hold(tables):
    drawn = {
        name: [[line.get_xdata()[0] for line in panel.get_lines()[2::2]] for panel in figure.axes]
        for name, figure in EXPERIMENT.figures(tables).items()
    }
    difference = tables["headwise_difference"]
    assert drawn == {
        "headwise_difference": [
            pytest.approx(100 * difference.loc[difference["ratio"] == ratio, "difference"])
            for ratio in RATIOS
        ],
    }


@pytest.fixture(scope="module")
def cli(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    random_model().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    arguments = ["headwise", "--model", str(folder), "--samples", "2", "--facts", "2"]
    arguments += ["--context", "64", "--contexts", "64", "--rounds", "1", "--ratio", "0.5"]
    return lambda *more: CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "160"})


def test_command_writes_what_it_shows(cli, tmp_path):
    result = cli("--part", "budgets", "--part", "decoding", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "AdaKV(SnapKV)" in result.output
    assert "ragged, 50% evicted" in result.output
    written = {path.name for path in tmp_path.iterdir()}
    names = {f"headwise_{name}" for name in ("accuracy", "difference", "decoding")}
    assert written == {f"{name}.csv" for name in names} | {"headwise_difference.svg"}
    decoding = pd.read_csv(tmp_path / "headwise_decoding.csv")
    assert set(decoding["model"]) == {"tiny"}
    assert set(decoding["context"]) == {64}
    assert FULL in set(decoding["condition"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "1"], "ratio"),
        (["--facts", "80"], "facts"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--part", "nothing"], "nothing"),
    ],
)
def test_command_says_what_is_wrong(cli, options, message):
    result = cli(*options)
    assert result.exit_code == 2
    assert message in result.output
