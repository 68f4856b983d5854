"""The facts task on pruned caches: what is evicted before what is asked, and what tables say."""

from __future__ import annotations

from dataclasses import replace

import matplotlib
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.cli import app
from experiments.framework import plots
from experiments.framework.command import progress_bar
from experiments.loading import load_model
from experiments.questions import quality
from experiments.questions.quality import EXPERIMENT, Condition
from experiments.testbed.asking import Task, answer_seen, answer_unseen, check_vocabulary
from experiments.testbed.facts import VOCABULARY, build_tokenizer, draw
from press_core import kept_lengths
from tests.support import build

both = pytest.mark.parametrize("package", [hooks_impl, patch_impl], ids=["hooks", "patches"])
protocols = pytest.mark.parametrize("answer", [answer_unseen, answer_seen])
PAIRS = [("KnormPress", "hook"), ("KnormPress", "patch")]
SILENT = progress_bar(disable=True)
SMALL = Task(context=32, facts=4, samples=3, seen_samples=10)


def tiny_model():
    """Random, in float64, so that answers do not hang on rounding."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).double()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def facts_llama():
    return load_model("facts-llama")[0]


def batch_of(rows=3, context=32, facts=4, seed=0):
    return draw(rows, context, facts, torch.Generator().manual_seed(seed))


def caches_when_asked(model, answer, press, batch):
    """What each layer keeps, per forward that finds something in its cache."""
    found = []

    def look(_, args, kwargs):
        cache = kwargs["past_key_values"]
        if cache.get_seq_length():
            found.append((kwargs["input_ids"], kept_lengths(cache), cache.get_seq_length()))

    with model.register_forward_pre_hook(look, with_kwargs=True):
        answer(model, press, batch)
    return found


# ---- protocols ---------------------------------------------------------------------------------


@both
@protocols
def test_ratio_zero_answers_as_no_press_does(model, package, answer):
    press = package.SnapKVPress(compression_ratio=0.0, window_size=8)
    assert torch.equal(answer(model, press, batch_of()), answer(model, None, batch_of()))


@both
def test_unseen_asks_every_question_of_what_is_left_of_the_context(model, package):
    batch = batch_of(rows=3, context=32, facts=4)
    press = package.KnormPress(compression_ratio=0.75)
    ((asked, kept, seen),) = caches_when_asked(model, answer_unseen, press, batch)
    assert torch.equal(asked, batch.question_ids.reshape(12, 2))
    assert seen == 33
    for lengths in kept:  # a quarter of <bos> and 32 words, in a copy per question
        assert torch.equal(lengths, torch.full((12, 2), 8))


@both
def test_seen_prunes_the_question_too_and_runs_its_last_token_again(model, package):
    batch = batch_of(rows=3, context=32, facts=4)
    press = package.KnormPress(compression_ratio=0.75)
    ((asked, kept, seen),) = caches_when_asked(model, answer_seen, press, batch)
    assert torch.equal(asked, batch.question_ids[:, 0, 1:])
    assert seen == 35
    for lengths in kept:
        assert torch.equal(lengths, torch.full((3, 2), 8))


def test_questions_do_not_see_each_other(model):
    """Each is answered as if it were the only one."""
    batch, press = batch_of(), hooks_impl.KeyDiffPress(compression_ratio=0.5)
    together = answer_unseen(model, press, batch)
    for i in range(batch.answer_ids.shape[1]):
        alone = batch.__class__(
            batch.context_ids,
            batch.question_ids[:, i : i + 1],
            batch.answer_ids[:, i : i + 1],
            batch.positions[:, i : i + 1],
        )
        assert torch.equal(answer_unseen(model, press, alone)[:, 0], together[:, i])


def test_unseen_without_a_press_is_one_long_forward(model):
    batch = batch_of()
    answers = answer_unseen(model, None, batch)
    for i in range(batch.answer_ids.shape[1]):
        text = torch.cat((batch.context_ids, batch.question_ids[:, i]), dim=1)
        assert torch.equal(model(text).logits[:, -1].argmax(-1), answers[:, i])


def test_the_scope_is_closed_afterwards(model):
    for package in (hooks_impl, patch_impl):
        answer_seen(model, package.KnormPress(compression_ratio=0.5), batch_of())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)


def test_the_shipped_model_tells_seen_from_unseen(facts_llama):
    """Read again at its own place, a question is understood; TOVA keeps what it looks at."""
    batch = batch_of(rows=24, context=64, facts=8, seed=1)
    truth, press = batch.answer_ids, hooks_impl.TOVAPress(compression_ratio=0.8)

    def share(answers):
        return (answers == truth[:, : answers.shape[1]]).double().mean().item()

    assert share(answer_unseen(facts_llama, None, batch)) > 0.95
    assert share(answer_seen(facts_llama, None, batch)) > 0.9
    seen, unseen = (share(f(facts_llama, press, batch)) for f in (answer_seen, answer_unseen))
    assert seen > 0.8
    assert unseen < 0.6


# ---- tables ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(model):
    measured = quality.conditions(PAIRS, [0.0, 0.5, 0.8])
    return quality.measure(model, measured, SMALL, SILENT, model_name="tiny")


def test_a_row_per_condition_and_kind_of_question(tables):
    table = tables["quality"]
    assert len(table) == 2 * (1 + 2 * 2)
    assert not table.duplicated(["press", "mechanism", "ratio", "question"]).any()
    assert set(table.loc[table["ratio"] == 0, "press"]) == {"no press"}
    unseen, seen = (table[table["question"] == q] for q in ("unseen", "seen"))
    assert set(unseen["samples"]) == {3}
    assert set(unseen["answers"]) == {12}
    assert set(seen["samples"]) == set(seen["answers"]) == {10}
    assert table.loc[table["question"] == "unseen", ["low", "high"]].isna().all(axis=None)


def test_questions_about_a_context_count_as_one(monkeypatch, model):
    """Of ten contexts, five are answered rightly and five wrongly, in all of their questions."""

    def every_other(model, press, batch):
        answers = batch.answer_ids.clone()
        answers[::2] += 1
        return answers

    monkeypatch.setitem(quality._PROTOCOLS, "unseen", every_other)
    task = replace(SMALL, samples=10)
    bare = quality.conditions([], [0.0])
    table = quality.measure(model, bare, task, SILENT, model_name="tiny")["quality"]
    row = table.set_index("question").loc["unseen"]
    assert row["accuracy"] == 0.5
    assert row["low"] < 0.3
    assert row["high"] > 0.7


def test_accuracy_counts_right_answers(monkeypatch, model):
    def two_of_three_wrong(model, press, batch):
        answers = batch.answer_ids.clone()
        answers[:2] += 1
        return answers

    monkeypatch.setitem(quality._PROTOCOLS, "unseen", two_of_three_wrong)
    table = quality.measure(model, quality.conditions([], [0.0]), SMALL, SILENT, model_name="tiny")[
        "quality"
    ]
    assert table.set_index("question")["accuracy"]["unseen"] == pytest.approx(1 / 3)


def test_mechanisms_agree_on_every_answer(tables):
    agreement = tables["quality_agreement"]
    assert len(agreement) == 4
    assert (agreement["answers"] == agreement["same"]).all()
    assert "different answers to **0** of 44 questions" in EXPERIMENT.markdown(tables)


def test_a_mechanism_that_answers_otherwise_is_noticed(monkeypatch, model):
    class Other(hooks_impl.KnormPress):
        def score(self, *arguments):
            return -super().score(*arguments)

    monkeypatch.setitem(patch_impl.PRESSES, "KnormPress", Other)
    measured = quality.conditions(PAIRS, [0.8])
    tables = quality.measure(model, measured, SMALL, SILENT, model_name="tiny")
    assert tables["quality_agreement"]["same"].sum() < tables["quality_agreement"]["answers"].sum()
    assert EXPERIMENT.findings(tables)[1].verdict == "breaks"


def test_contexts_are_the_same_for_every_condition():
    first, again = SMALL.batches("seen"), SMALL.batches("seen")
    assert [len(batch.context_ids) for batch in first] == [8, 2]
    assert all(torch.equal(a.context_ids, b.context_ids) for a, b in zip(first, again, strict=True))


# ---- choosing presses --------------------------------------------------------------------------


def test_every_press_is_compared_or_there_is_a_reason():
    assert set(quality.NOT_COMPARED) < set(hooks_impl.PRESSES)
    assert len(quality.press_names()) == len(hooks_impl.PRESSES) - len(quality.NOT_COMPARED)


@pytest.mark.parametrize("name", quality.press_names())
def test_presses_evict_what_they_are_told(name, facts_llama):
    """Of a context as long as those compared, on the model that they are compared on."""
    press, batch = Condition(name, "patch", 0.75).make(256), batch_of(rows=1, context=256)
    answer = answer_seen if name in quality.NEEDS_QUESTION else answer_unseen
    ((_, kept, _),) = caches_when_asked(facts_llama, answer, press, batch)
    share = torch.cat(kept).double().mean() / batch.context_ids.shape[1]
    # by heads (there are 16) and by chunks (of 20 tokens) not to the token
    assert 0.75 - 1 / 16 <= 1 - share <= 0.75 + 1 / 16


def test_random_eviction_repeats():
    assert Condition("RandomPress", "hook", 0.5).make(512).seed is not None


@both
def test_finch_sees_the_question_and_the_model_no_delimiter(model, package):
    batch, mechanism = batch_of(), "hook" if package is hooks_impl else "patch"
    press = Condition("FinchPress", mechanism, 0.0).make(32)
    assert torch.equal(answer_seen(model, press, batch), answer_seen(model, None, batch))
    press = Condition("FinchPress", mechanism, 0.75).make(32)
    ((asked, kept, _),) = caches_when_asked(model, answer_seen, press, batch)
    assert torch.equal(asked, batch.question_ids[:, 0, 1:])
    assert all(torch.equal(lengths, torch.full((3, 2), 8)) for lengths in kept)


def test_what_needs_a_question_is_not_asked_without():
    measured = quality.conditions([("FinchPress", "hook")], [0.5])
    table = quality.measure(
        tiny_model(), measured, replace(SMALL, seen_samples=1), SILENT, model_name="tiny"
    )["quality"]
    assert table["question"].tolist() == ["seen"]


def test_a_press_that_the_model_does_not_suit_is_left_out_and_named():
    names = ["ExpectedAttentionPress", "KnormPress"]
    pairs, refusals = quality.fitting(build("gpt2"), names, ["hook", "patch"])
    assert pairs == [("KnormPress", "hook"), ("KnormPress", "patch")]
    assert [r.split(":")[0] for r in refusals] == [
        "ExpectedAttentionPress (hook)",
        "ExpectedAttentionPress (patch)",
    ]


def test_another_vocabulary_is_refused():
    tokenizer = build_tokenizer()
    check_vocabulary(tokenizer, "facts")
    tokenizer.add_tokens(["zebra"])
    with pytest.raises(UserError, match="vocabulary"):
        check_vocabulary(tokenizer, "zoo")


# ---- figure, summary, command ------------------------------------------------------------------


def shown_in(axes):
    """Texts in the cells of a panel, from the top and the left."""
    ordered = sorted(axes.texts, key=lambda text: text.get_position()[::-1])
    return [text.get_text() for text in ordered]


def test_figure_has_a_cell_per_press_ratio_and_question(tables):
    before = dict(matplotlib.rcParams)
    figure = EXPERIMENT.figures(tables)["quality"]
    assert dict(matplotlib.rcParams) == before
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Question unseen",
        "Question seen",
    ]
    assert "differ" not in figure.get_label()
    table = tables["quality"].drop_duplicates(["press", "ratio", "question"])
    for axes, question in zip(figure.axes, ("unseen", "seen"), strict=True):
        rows = table[(table["question"] == question) & (table["ratio"] > 0)]
        assert shown_in(axes) == [f"{row.accuracy:.0%}" for row in rows.itertuples()]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["50%", "80%"]
        assert not axes.patches


def test_figure_frames_where_mechanisms_differ(tables):
    agreement = tables["quality_agreement"].copy()
    wrong = (agreement["ratio"] == 0.8) & (agreement["question"] == "seen")
    agreement.loc[wrong, "same"] -= 1
    figure = EXPERIMENT.figures(tables | {"quality_agreement": agreement})["quality"]
    assert [[frame.get_xy() for frame in axes.patches] for axes in figure.axes] == [[], [(1, 0)]]
    assert "framed where hook and patch differ" in figure.get_label()


def test_figure_leaves_cells_empty_that_were_not_measured(tables):
    table = tables["quality"]
    table = table[(table["question"] == "seen") | (table["press"] == "no press")]
    unseen, seen = EXPERIMENT.figures(tables | {"quality": table})["quality"].axes
    assert shown_in(unseen) == []
    assert len(shown_in(seen)) == 2


def test_every_press_has_a_look_of_its_own():
    looks = [str(plots.press_line(name) | {"label": ""}) for name in hooks_impl.PRESSES]
    assert len(set(looks)) == len(looks)
    assert plots.press_line("UnknownPress") == plots.press_line("UnknownPress")


def test_summary_has_a_row_per_press_and_a_column_per_ratio(tables):
    quality = tables["quality"].assign(accuracy=0.5, low=0.25, high=0.75)
    lines = EXPERIMENT.markdown(tables | {"quality": quality}).splitlines()
    (row,) = [line for line in lines if line.startswith("| Knorm")]
    assert row.count("50 [25, 75]") == 4
    assert "unseen, 80% evicted" in "".join(lines)
    assert lines[-1].startswith("- Not compared: Composed (a combination of presses ")


def test_summary_names_all_of_the_best(tables):
    table = tables["quality"].copy()
    other = table[table["press"] == "KnormPress"].assign(press="AdaKVPress")
    table = pd.concat((table, other))
    table.loc[table["ratio"] == 0.8, "accuracy"] = 0.5
    table.loc[(table["ratio"] == 0.5) & (table["press"] == "KnormPress"), "accuracy"] = 0.75
    text = EXPERIMENT.markdown(tables | {"quality": table})
    assert "with Knorm (75%) at 50% evicted; Knorm and AdaKV (50%) at 80% evicted." in text
    assert "- AdaKV wraps SnapKV." in text


@pytest.fixture(scope="module")
def cli(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().float().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    arguments = [
        "quality",
        "--model",
        str(folder),
        "--context",
        "32",
        "--facts",
        "4",
        "--seen-samples",
        "2",
    ]
    return lambda *more: CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "120"})


def test_command_writes_what_it_shows(cli, tmp_path):
    options = [
        "--press",
        "KnormPress",
        "--mechanism",
        "patch",
        "--samples",
        "2",
        "--seen-samples",
        "2",
    ]
    result = cli(*options, "--ratio", "0", "--ratio", "0.5", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "Knorm" in result.output
    assert "patch" in result.output
    table = pd.read_csv(tmp_path / "quality.csv")
    assert set(table["mechanism"]) == {"bare", "patch"}
    assert set(table["model"]) == {"tiny"}
    assert (tmp_path / "quality.svg").stat().st_size > 1_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--press", "NoSuchPress"], "there is no press 'NoSuchPress'; there are AdaKV, "),
        (["--press", "thinkpress"], "evicts channels of the keys"),
        (["--ratio", "1.5"], "compression_ratio"),
        (["--facts", "40"], "facts"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_command_says_what_is_wrong(cli, options, message):
    result = cli(*options)
    assert result.exit_code == 2
    assert message in result.output
