"""The facts task on pruned caches: what is evicted before what is asked, and what tables say."""

from dataclasses import replace

import matplotlib
import pytest
import torch

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.questions import quality
from experiments.questions.quality import EXPERIMENT, Options
from experiments.testbed.facts import Task, answer_seen, answer_unseen, check_vocabulary, draw
from experiments.testbed.recipes import recipe_pair
from press_core import PressError, kept_lengths
from tests.experiments.tiny import SILENT
from tests.support import both, build, unchanged

MODEL, DTYPE = "facts-llama", torch.float64  # no rounding error decides an answer
protocols = pytest.mark.parametrize("answer", [answer_unseen, answer_seen])
SMALL = Task(context=32, facts=4, samples=10)


def batch_of(rows=3, context=32, facts=4, seed=0):
    return draw(rows, context, facts, torch.Generator().manual_seed(seed))


def caches_when_asked(model, answer, press, batch):
    """What is asked of a pruned cache, what its layers keep, and what it has seen, per forward."""
    found = []

    def look(_, args, kwargs):
        cache = kwargs["past_key_values"]
        if cache.get_seq_length():
            found.append((kwargs["input_ids"], kept_lengths(cache), cache.get_seq_length()))

    with model.register_forward_pre_hook(look, with_kwargs=True):
        answer(model, press, batch)
    return found


# ---- protocols -----------------------------------------------------------------------------------


@both
@protocols
def test_ratio_zero_answers_as_no_press_does_and_leaves_nothing(model, package, answer):
    press = package.SnapKVPress(compression_ratio=0.0, window_size=8)
    with unchanged(model):
        assert torch.equal(answer(model, press, batch_of()), answer(model, None, batch_of()))


@both
@protocols
def test_what_is_left_of_the_context_is_asked(model, package, answer):
    """A quarter of <bos> and 32 words, in a copy per question; or of a question more, which is
    pruned too, and whose last token runs again."""
    batch, press = batch_of(rows=3, context=32, facts=4), package.KnormPress(compression_ratio=0.75)
    ((asked, kept, seen),) = caches_when_asked(model, answer, press, batch)
    unseen = answer is answer_unseen
    expected = batch.question_ids.reshape(12, 2) if unseen else batch.question_ids[:, 0, 1:]
    assert torch.equal(asked, expected)
    assert seen == (33 if unseen else 35)
    for lengths in kept:
        assert torch.equal(lengths, torch.full((12 if unseen else 3, 4), 8))


def test_the_shipped_model_tells_seen_from_unseen(model):
    """Read again at its own place, a question is understood; TOVA keeps what it looks at."""
    batch = batch_of(rows=24, context=64, facts=8, seed=1)
    truth, press = batch.answer_ids, hooks_impl.TOVAPress(compression_ratio=0.8)

    def share(answers):
        return (answers == truth[:, : answers.shape[1]]).double().mean().item()

    assert share(answer_unseen(model, None, batch)) > 0.95
    assert share(answer_seen(model, None, batch)) > 0.9
    assert share(answer_seen(model, press, batch)) > 0.8
    assert share(answer_unseen(model, press, batch)) < 0.6


# ---- tables --------------------------------------------------------------------------------------


def measured(model, *presses, task=SMALL):
    tables = quality.measure(model, presses, (0.5, 0.8), task, SILENT)
    return tables | {"quality": tables["quality"].assign(model="tiny")}


@pytest.fixture(scope="module")
def tables(model):
    return measured(model, "KnormPress")


def test_a_row_per_press_ratio_mechanism_and_kind_of_question(tables):
    table = tables["quality"]
    assert len(table) == 2 * (1 + 2 * 2)
    assert not table.duplicated(["press", "mechanism", "ratio", "question"]).any()
    assert set(table.loc[table["ratio"] == 0, "press"]) == {"no press"}
    unseen, seen = (table[table["question"] == q] for q in ("unseen", "seen"))
    assert set(table["samples"]) == set(seen["answers"]) == {10}
    assert set(unseen["answers"]) == {40}
    agreement = tables["quality_agreement"]
    assert len(agreement) == 4
    assert (agreement["answers"] == agreement["same"]).all()
    assert agreement["answers"].sum() == 100
    assert EXPERIMENT.findings(tables)[1].number == 0


def test_accuracy_counts_right_answers_and_contexts_are_its_units(monkeypatch, model):
    """Of ten contexts, five are answered rightly and five wrongly, in all of their questions."""

    def every_other(model, press, batch):
        answers = batch.answer_ids.clone()
        answers[::2] += 1
        return answers

    monkeypatch.setitem(quality._PROTOCOLS, "unseen", every_other)
    table = measured(model, task=SMALL)["quality"]
    row = table.set_index("question").loc["unseen"]
    assert row["accuracy"] == 0.5
    assert row["units"] == "0 1 0 1 0 1 0 1 0 1"
    assert row["low"] < 0.3 < 0.7 < row["high"]
    few = measured(model, task=replace(SMALL, samples=3))["quality"]
    assert few[["low", "high"]].isna().all(axis=None)


def test_a_mechanism_that_answers_otherwise_is_noticed(monkeypatch, model):
    class Other(hooks_impl.KnormPress):
        def score(self, *arguments):
            return -super().score(*arguments)

    monkeypatch.setitem(patch_impl.PRESSES, "KnormPress", Other)
    tables = measured(model, "KnormPress")
    assert tables["quality_agreement"]["same"].sum() < tables["quality_agreement"]["answers"].sum()
    assert EXPERIMENT.findings(tables)[1].verdict == "breaks"


# ---- choosing presses ----------------------------------------------------------------------------


def test_finch_sees_the_question_and_the_model_no_delimiter(model):
    batch, answers = batch_of(), answer_seen(model, None, batch_of())
    for whole, press in zip(*(recipe_pair("FinchPress", n, 32) for n in (0.0, 0.75)), strict=True):
        assert torch.equal(answer_seen(model, whole, batch), answers)
        ((asked, kept, _),) = caches_when_asked(model, answer_seen, press, batch)
        assert torch.equal(asked, batch.question_ids[:, 0, 1:])
        assert all(torch.equal(lengths, torch.full((3, 4), 8)) for lengths in kept)
    assert set(measured(model, "FinchPress")["quality_agreement"]["question"]) == {"seen"}


def test_a_press_that_the_model_does_not_suit_is_left_out(monkeypatch):
    names, options = ["ExpectedAttentionPress", "KnormPress"], Options(ratio=(0.5,))
    monkeypatch.setattr(quality, "press_names", lambda: names)
    assert list(quality.suited(build("gpt2"), options, SILENT)) == ["KnormPress"]
    asked = replace(options, press=("ExpectedAttention",))
    with pytest.raises(PressError, match="ExpectedAttentionPress"):
        list(quality.suited(build("gpt2"), asked, SILENT))


def test_another_vocabulary_is_refused(tokenizer):
    check_vocabulary(tokenizer, "facts")
    tokenizer.add_tokens(["zebra"])
    with pytest.raises(UserError, match="vocabulary"):
        check_vocabulary(tokenizer, "zoo")


# ---- figure, summary --------------------------------------------------------------------


@pytest.mark.parametrize("left_out", ["", "unseen"])
def test_the_figure_has_a_cell_per_press_ratio_and_question_measured(tables, left_out):
    before = dict(matplotlib.rcParams)
    table = tables["quality"]
    table = table[(table["question"] != left_out) | (table["press"] == "no press")]
    panels = EXPERIMENT.figures(tables | {"quality": table})["quality"].axes
    assert dict(matplotlib.rcParams) == before
    rows = table[table["ratio"] > 0].drop_duplicates(["press", "ratio", "question"])
    assert [panel.get_title("left") for panel in panels] == list(rows["question"].unique())
    for panel in panels:
        shown = [text.get_text() for text in panel.texts]
        own = rows[rows["question"] == panel.get_title("left")]
        assert shown == [f"{share:.0%}" for share in own["accuracy"]]
        assert [label.get_text() for label in panel.get_xticklabels()] == ["50%", "80%"]
