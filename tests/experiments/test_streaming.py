"""Streams through bounded caches: what they hold, what they are compared with, what is told."""

from __future__ import annotations

import gc

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from experiments import UserError
from experiments.cli import app
from experiments.framework.command import progress_bar
from experiments.loading import load_model
from experiments.questions import streaming
from experiments.questions.streaming import (
    AS_THEY_WERE,
    COMPARED,
    EXPERIMENT,
    FULL,
    HELD,
    IGNORED,
    IN_CACHE,
    RECOMPUTED,
    SINKS,
    STREAMED,
    WINDOW,
    Bound,
    Options,
    Size,
    Stream,
    Text,
)
from experiments.testbed.facts import build_tokenizer
from experiments.testbed.sinks import attention_to_first, eager
from press_core import HyperparameterError, cache_nbytes, kept_lengths
from tests.support import build, snapshot, token_ids

SMALL = Size(tokens=60, capacity=15, full=40, n_sink=2, stretch=10)
BOUNDED = STREAMED[1:]


@pytest.fixture(scope="module")
def model():
    return build("gpt_neox")


@pytest.fixture(scope="module")
def text():
    return Text(token_ids(1, SMALL.tokens + 1)[0], unknown=None)


def settled(model):
    """A snapshot, once transformers has noted on the class that attention can be changed."""
    with eager(model):
        pass
    return snapshot(model)


@pytest.fixture(scope="module")
def tables(model, text):
    before = settled(model)
    tables = streaming.stream_text(
        model, text, SMALL, progress_bar(disable=True), model_name="tiny"
    )
    assert snapshot(model) == before
    return tables


def rows_of(tables, *bound):
    return streaming._of(tables["streaming"], Bound(*bound))


@torch.inference_mode()
def losses_at_once(model, text, first, end):
    """Of the tokens from `first` to `end`, which see each other and nothing else."""
    logits = model(text.ids[None, first:end], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, text.targets[first:end], reduction="none")


# ---- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", BOUNDED, ids=str)
def test_both_mechanisms_stream_the_same_bits(bound):
    shipped, _ = load_model("stdlib-neox")
    size = Size(tokens=64, capacity=31)
    text = Text(torch.randint(3, 2000, (65,), generator=torch.manual_seed(0)), None)
    hook, patch = (Stream(shipped, text, size.press(bound, m)) for m in ("hook", "patch"))
    assert torch.equal(hook.advance(64).losses, patch.advance(64).losses)
    for one, other in zip(hook.cache.layers, patch.cache.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("bound", STREAMED, ids=str)
def test_taking_turns_changes_nothing(model, text, bound):
    at_once, in_turns = (Stream(model, text, SMALL.press(bound)) for _ in range(2))
    parts = []
    for n_tokens in (7, 20, 1, 32):
        parts.append(in_turns.advance(n_tokens).losses)
        model(token_ids(2, 9))  # somebody else's turn
    assert torch.equal(at_once.advance(60).losses, torch.cat(parts))


@pytest.mark.parametrize("bound", BOUNDED, ids=str)
def test_bounded_caches_hold_what_they_say(model, text, bound):
    stream = Stream(model, text, SMALL.press(bound))
    stream.advance(41)
    sinks = [0, 1] if bound.cache == SINKS else []
    recent = list(range(41 - 16 + len(sinks), 41))
    for layer in stream.cache.layers:
        assert layer.all_positions()[0, 0].tolist() == sinks + recent


def test_a_full_cache_loses_nothing(model, text):
    stream = Stream(model, text, SMALL.press(Bound(FULL)))
    streamed = stream.advance(40).losses
    assert streamed == pytest.approx(losses_at_once(model, text, 0, 40), abs=1e-4)
    assert kept_lengths(stream.cache)[0].unique().tolist() == [40]


@pytest.mark.parametrize("bound", BOUNDED, ids=str)
def test_nothing_grows_unseen(model, text, bound):
    """Neither in the cache, nor anywhere else."""
    long = Text(text.ids.repeat(4), None)
    stream = Stream(model, long, SMALL.press(bound))
    stream.advance(40)
    held, alive = cache_nbytes(stream.cache), living_tensors()
    stream.advance(100)
    assert cache_nbytes(stream.cache) == held
    assert living_tensors() == alive


def living_tensors():
    """Bytes of all tensors of the process."""
    gc.collect()
    # Subclasses, such as the tensors of an exported program, need not have any storage.
    kinds = torch.Tensor, torch.nn.Parameter
    tensors = [thing for thing in gc.get_objects() if type(thing) in kinds]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


# ---- what streams are compared with --------------------------------------------------------------


def test_recomputed_queries_see_up_to_a_window(model, text):
    losses = streaming.recomputed_losses(model, text, window=16)
    assert losses.shape == (60,)
    assert losses[:16] == pytest.approx(losses_at_once(model, text, 0, 16), abs=1e-4)
    for end in (20, 24, 56, 60):  # each forward serves four tokens, with twelve before them
        alone = losses_at_once(model, text, end - 16, end)[-4:]
        assert losses[end - 4 : end] == pytest.approx(alone, abs=1e-4)


def test_recomputed_windows_begin_as_the_text_does(model, text):
    begun = text._replace(begin=int(text.ids[0]))
    losses = streaming.recomputed_losses(model, begun, window=16)
    assert losses[:16] == pytest.approx(losses_at_once(model, text, 0, 16), abs=1e-4)
    for end in (20, 56):
        window = torch.cat((text.ids[:1], text.ids[end - 15 : end + 1]))
        alone = losses_at_once(model, Text(window, None), 0, 16)[-4:]
        assert losses[end - 4 : end] == pytest.approx(alone, abs=1e-4)


def test_unknown_words_are_no_target(model, text):
    targets = text._replace(unknown=int(text.ids[5])).targets
    assert (targets == IGNORED).equal(text.ids[1:] == text.ids[5])
    unknown = text._replace(unknown=int(text.ids[5]))
    streamed = Stream(model, unknown, None).advance(30).losses
    recomputed = streaming.recomputed_losses(model, unknown, 16)
    assert streamed.isnan().equal((targets == IGNORED)[:30])
    assert recomputed.isnan().equal(targets == IGNORED)


def test_attention_is_looked_at_in_windows_that_begin_as_the_text_does(text):
    rows = streaming.windows_of(text, 16)
    assert rows.shape == (3, 16)  # of 59 tokens after the first
    assert (rows[:, 0] == text.ids[0]).all()
    assert rows[:, 1:].flatten().equal(text.ids[1:46])
    assert len(streaming.windows_of(text, 16, most=2)) == 2


def test_attention_that_is_even_is_found_even(text):
    model = build("llama")
    rows = streaming.windows_of(text, 16)
    found = attention_to_first(model, rows)
    assert not np.allclose(found["share"], found["even"])
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    even = attention_to_first(model, rows)
    assert even["share"].to_numpy() == pytest.approx(even["even"].to_numpy())


# ---- the text ------------------------------------------------------------------------------------


def test_a_file_is_read_as_text(tmp_path):
    _, tokenizer = load_model("stdlib-neox")
    path = tmp_path / "some.txt"
    path.write_text("return self.value qqqq\n" * 20, encoding="utf-8")
    read = streaming.read_text(tokenizer, 12, path)
    words = tokenizer.convert_ids_to_tokens(read.ids.tolist())
    assert read.begin == tokenizer.bos_token_id
    assert words[:7] == ["<bos>", "return", "self", ".", "value", "<unk>", "\n"]
    assert len(words) == 13
    assert read.targets.tolist().count(IGNORED) == 2
    with pytest.raises(UserError, match=r"cannot stream 500 tokens: .*some.txt has 120 for this"):
        streaming.read_text(tokenizer, 500, path)


def test_standard_library_is_long_enough_for_twenty_thousand_tokens():
    _, tokenizer = load_model("stdlib-neox")
    assert len(streaming.read_text(tokenizer, 20_000).ids) == 20_001


# ---- tables --------------------------------------------------------------------------------------


def test_every_cache_is_measured_along_the_text(tables):
    table = tables["streaming"]
    for bound in (*STREAMED, COMPARED):
        rows = streaming._of(table, bound)
        last = 40 if bound.cache == FULL else 60
        assert rows["first"].tolist() == list(range(0, last, 10))
        assert rows["end"].tolist() == list(range(10, last + 10, 10))
        assert (rows["known"] == 10).all()
    assert (table["capacity"] == 15).all()
    assert (table["n_sink"] == 2).all()


def test_bounded_caches_stay_as_they_are(tables):
    for bound in BOUNDED:
        rows = rows_of(tables, *bound)
        assert rows["length"].tolist() == [10, *[16] * 5]
        per_token = 2 * 2 * 4 * 16 * 4  # keys and values, layers, heads, channels, float32
        assert (rows["bytes"] == rows["length"] * per_token).all()
    assert rows_of(tables, FULL)["length"].tolist() == [10, 20, 30, 40]


def test_a_window_alone_has_nothing_to_turn(model, text):
    both = [Stream(model, text, SMALL.press(Bound(WINDOW, p))) for p in ("original", IN_CACHE)]
    original, turned = (stream.advance(60).losses for stream in both)
    assert original.equal(turned)


def test_positions_matter_once_tokens_are_evicted(tables):
    window, original, turned = (
        rows_of(tables, *bound)["loss"].tolist() for bound in (Bound(WINDOW), AS_THEY_WERE, HELD)
    )
    assert window[0] == original[0] == turned[0]
    assert window[2:] != original[2:] != turned[2:]


def test_losses_are_means_over_stretches(tables, model, text):
    expected = losses_at_once(model, text, 0, 40).unflatten(0, (4, 10)).mean(1)
    assert rows_of(tables, FULL)["loss"].to_numpy() == pytest.approx(expected.numpy(), abs=1e-4)


# ---- what is told --------------------------------------------------------------------------------


def made_up(**losses):
    """A table in which each cache has one loss, but for rounding, and a full cache gets slower.

    Args:
        losses: of the window, w; of sinks + window, s, and with original positions, o.
    """
    named = {Bound(WINDOW): "w", HELD: "s", AS_THEY_WERE: "o"}
    rows = [
        bound._asdict()
        | {
            "model": "made up",
            "guessing": losses.get("guess", 6.0),
            "capacity": 15,
            "n_sink": 2,
            "first": first,
            "end": first + 10,
        }
        | {"loss": losses.get(named.get(bound), 2.0) + first / 1000, "known": 10}
        | {"ms": 4.0, "quick_ms": 3 + first * (bound.cache == FULL), "quick_ms_alone": 1.5}
        | {"length": 16, "bytes": 1024}
        for bound in (*STREAMED, COMPARED)
        for first in range(0, 160, 10)
    ]
    table = pd.DataFrame(rows)
    table["loss"] += np.random.default_rng(0).normal(0, 1e-3, len(table))
    return table


def test_the_papers_picture_is_told():
    sinks, alone, positions = streaming.find_sinks(made_up(w=5.0, s=2.05, o=3.0))
    assert "holds over 160 tokens: **+0.0" in sinks.text
    assert "A window alone breaks: **+" in alone.text
    assert "original positions the window breaks: **+" in positions.text
    assert [f.verdict for f in (sinks, alone, positions)] == ["works", "breaks", "breaks"]


def test_another_picture_is_told_as_it_is():
    sinks, alone, positions = streaming.find_sinks(made_up(s=2.25))
    assert "breaks over 160 tokens: **+0.2" in sinks.text
    assert "A window alone holds: **" in alone.text
    assert [f.verdict for f in (sinks, alone, positions)] == ["breaks", "works", "works"]


def test_a_difference_within_its_interval_is_undecided():
    table = made_up()
    noisy = (table["cache"] == WINDOW) & (table["first"] == 100)
    table.loc[noisy, "loss"] += 30
    alone = streaming.find_sinks(table)[1]
    assert "A window alone is undecided: **+2." in alone.text
    assert alone.verdict is None


def test_nothing_is_said_of_losses_that_are_not_known():
    assert streaming.find_sinks(made_up().assign(loss=np.nan, known=0)) == []


def test_slowing_down_is_told_apart_from_a_slower_machine():
    table = made_up()
    assert streaming._slowdown(streaming._of(table, Bound(FULL))) == pytest.approx(138 / 58)
    table.loc[table["first"] >= 100, ["quick_ms", "quick_ms_alone"]] *= 4
    pace, growth = streaming.find_pace(table)
    assert "take 1.00 to **1.00** times as long as" in pace.text
    assert "2.38 in a full one" in pace.text
    assert ("become **1.00** times as many" in growth.text, growth.verdict) == (True, "works")


def test_growing_caches_are_told():
    table = made_up()
    table.loc[table["first"] == 150, "bytes"] *= 3
    _, growth = streaming.find_pace(table)
    assert ("become **3.00** times as many" in growth.text, growth.verdict) == (True, "breaks")


def test_attention_to_the_first_token_is_told(tables):
    table = tables["streaming_attention"]
    shares = np.linspace(0.25, 0.75, len(table))
    table = table.assign(share=shares, even=0.125)
    found = streaming.find_attention(table)
    assert "first token **50.0%** of their attention, one head 75.0%" in found.text
    assert found.text.endswith("it would be 12.5%.")
    text = EXPERIMENT.markdown(tables | {"streaming_attention": table})
    assert "| layer 0 | 25% |" in text


def test_summary_has_a_line_per_cache(tables):
    text = EXPERIMENT.markdown(tables)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert names.count("sinks + window, in-cache positions") == names.count("window") == 2
    assert names.count(RECOMPUTED) == 1
    assert "nan" not in text


def drawn(panel):
    return [line for line in panel.get_lines() if len(line.get_xdata()) > 2]


def test_figures_have_a_line_per_cache(tables):
    figures = EXPERIMENT.figures(tables)
    assert list(figures) == ["streaming", "streaming_attention", "streaming_costs"]
    (loss,) = figures["streaming"].axes
    assert len(drawn(loss)) == len(STREAMED)
    above = drawn(loss)[1].get_ydata()
    windows = rows_of(tables, WINDOW)["loss"].to_numpy()
    recomputed = rows_of(tables, *COMPARED)["loss"].to_numpy()
    assert above == pytest.approx(windows - recomputed)
    time, memory = figures["streaming_costs"].axes
    assert (len(drawn(time)), len(drawn(memory))) == (len(STREAMED), 2)


def test_lines_are_labelled_where_they_end(tables):
    (loss,) = EXPERIMENT.figures(tables)["streaming"].axes
    labels = {text.get_text(): text for text in loss.texts}
    assert set(labels) == {line.get_label() for line in drawn(loss)}
    for line in drawn(loss):
        label = labels[line.get_label()]
        assert label.arrowprops["color"] == line.get_color()
        assert label.xy[0] == line.get_xdata()[-1]
    heights = sorted(label.xyann[1] for label in labels.values())
    assert min(np.diff(heights)) > 0.05


# ---- command -------------------------------------------------------------------------------------


def test_sizes_follow_the_model(model):
    assert streaming.size_for(model, Options()) == Size(
        capacity=1023, full=4 * 4096, stretch=Options.tokens // 80
    )
    shipped, _ = load_model("stdlib-neox")
    assert streaming.size_for(shipped, Options()) == Size(stretch=Options.tokens // 80)
    given = Options(tokens=500, capacity=31, n_sink=1, full=64)
    assert streaming.size_for(shipped, given) == Size(500, 31, 64, 1)


@pytest.fixture(scope="module")
def cli(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    words = folder / "text.txt"
    words.write_text(" ".join(["w1"] * 500), encoding="utf-8")
    arguments = ["streaming", "--model", str(folder), "--text", str(words)]
    return lambda *more: CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "120"})


def test_command_writes_what_it_shows(cli, tmp_path):
    sizes = ["--tokens", "495", "--capacity", "31", "--n-sink", "2", "--full", "200"]
    result = cli(*sizes, "--mechanism", "patch", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "tiny, 495 tokens one by one (full cache: 200)" in result.output
    table = pd.read_csv(tmp_path / "streaming.csv")
    assert set(table["mechanism"]) == {"patch"}
    assert table["end"].max() == 495
    assert len(pd.read_csv(tmp_path / "streaming_attention.csv")) == 8  # heads of two layers
    assert (tmp_path / "streaming.svg").stat().st_size > 3_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "300"], "300 tokens are too few to see what a cache of 1,023 evicts"),
        (["--tokens", "495", "--capacity", "31", "--n-sink", "31"], "max_capacity must be"),
        (["--tokens", "900", "--capacity", "31"], "cannot stream 900 tokens"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_command_says_what_is_wrong(cli, options, message):
    result = cli(*options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_more_sinks_than_a_cache_holds_are_refused(model):
    size = Size(capacity=4, n_sink=4)
    with pytest.raises(HyperparameterError, match="max_capacity"), size.press(STREAMED[3])(model):
        pass
