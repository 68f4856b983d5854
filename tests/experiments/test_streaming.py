"""Streams through bounded caches: what they hold, what they are compared with, what is told."""

import gc

import numpy as np
import pandas as pd
import pytest
import torch

from experiments import UserError
from experiments.loading import load_model
from experiments.questions import streaming
from experiments.questions.streaming import EXPERIMENT, Options, rows_of, size_for
from experiments.testbed import streams
from experiments.testbed.streams import FULL, RECOMPUTED, SINKS, STREAMED, WINDOW, Stream, Text
from press_core import cache_nbytes, kept_lengths
from tests.experiments.tiny import CASES, SILENT
from tests.support import token_ids, unchanged

MODEL = "gpt_neox"
SMALL = streams.Size(tokens=60, capacity=15, full=40, n_sink=2, stretch=10)


@pytest.fixture(scope="module")
def text():
    (ids,) = token_ids(1, SMALL.tokens + 1)
    return Text(ids[:-1], ids[1:].clone())


@pytest.fixture(scope="module")
def table(model, text):
    with unchanged(model):
        return streams.stream_text(model, text, SMALL, SILENT).assign(model="tiny")


@torch.inference_mode()
def losses_at_once(model, text, seen):
    """Of the tokens at places `seen`, which see each other and nothing else."""
    logits = model(text.ids[None, seen], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, text.targets[seen], reduction="none")


# ---- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", STREAMED, ids=str)
def test_taking_turns_changes_nothing(model, text, cache):
    at_once, in_turns = (Stream(model, text, SMALL.press(cache)) for _ in range(2))
    parts = []
    for n_tokens in (7, 20, 1, 32):
        parts.append(in_turns.advance(n_tokens)[0])
        model(token_ids(2, 9))  # somebody else's turn
    assert torch.equal(at_once.advance(60)[0], torch.cat(parts))


@pytest.mark.parametrize("cache", STREAMED[1:], ids=str)
def test_bounded_caches_hold_what_they_say_and_nothing_grows_elsewhere(model, text, cache):
    stream = Stream(model, Text(text.ids.repeat(4), text.targets.repeat(4)), SMALL.press(cache))
    stream.advance(40)
    n_bytes, alive = cache_nbytes(stream.cache), living_tensors()
    stream.advance(101)
    assert cache_nbytes(stream.cache) == n_bytes
    assert living_tensors() == alive
    sinks = [0, 1] if cache != WINDOW else []
    for layer in stream.cache.layers:
        held = [*sinks, *range(141 - 16 + len(sinks), 141)]
        assert layer.all_positions()[0, 0].tolist() == held


def living_tensors():
    """Bytes of all tensors of the process."""
    gc.collect()
    # Subclasses, such as the tensors of an exported program, need not have any storage.
    kinds = torch.Tensor, torch.nn.Parameter
    tensors = [thing for thing in gc.get_objects() if type(thing) in kinds]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_a_full_cache_loses_nothing(model, text):
    stream = Stream(model, text, SMALL.press(FULL))
    assert stream.advance(40)[0] == pytest.approx(losses_at_once(model, text, range(40)), abs=1e-4)
    assert kept_lengths(stream.cache)[0].unique().tolist() == [40]


def test_recomputed_windows_begin_as_the_text_does(model, text):
    losses = streams.recomputed_losses(model, text, window=16)
    assert losses.shape == (60,)
    assert losses[:16] == pytest.approx(losses_at_once(model, text, range(16)), abs=1e-4)
    for end in (20, 24, 56, 60):  # each forward serves four tokens, with twelve before them
        alone = losses_at_once(model, text, [0, *range(end - 15, end)])[-4:]
        assert losses[end - 4 : end] == pytest.approx(alone, abs=1e-4)


# ---- the text ------------------------------------------------------------------------------------


def test_a_file_is_read_as_text_without_unknown_words_as_targets(model, tmp_path):
    _, tokenizer = load_model("stdlib-neox")
    path = tmp_path / "some.txt"
    path.write_text("return self.value qqqq\n" * 20, encoding="utf-8")
    read = streams.read_text(tokenizer, 13, path)
    words = tokenizer.convert_ids_to_tokens(read.ids.tolist())
    assert words[:7] == ["<bos>", "return", "self", ".", "value", "<unk>", "\n"]
    unknown = read.targets == streams.IGNORED
    assert unknown.nonzero().flatten().tolist() == [4, 10]
    assert read.targets[:-1][~unknown[:-1]].equal(read.ids[1:][~unknown[:-1]])
    small = Text(read.ids % 100, read.targets.where(unknown, read.targets % 100))
    assert Stream(model, small, None).advance(13)[0].isnan().equal(unknown)
    assert streams.recomputed_losses(model, small, 16).isnan().equal(unknown)
    with pytest.raises(UserError, match=r" 500 tokens.*some.txt has 120 "):
        streams.read_text(tokenizer, 500, path)
    path.write_text("qqqq " * 20, encoding="utf-8")
    with pytest.raises(UserError, match=r"no word .*some.txt"):
        streams.read_text(tokenizer, 12, path)


def test_standard_library_is_long_enough():
    _, tokenizer = load_model("stdlib-neox")
    assert len(streams.read_text(tokenizer, Options.tokens).ids) == Options.tokens


# ---- the table -----------------------------------------------------------------------------------


def test_every_cache_is_measured_along_the_text(table, model, text):
    for cache in STREAMED:
        rows = rows_of(table, cache)
        last = 40 if cache == FULL else 60
        assert rows["first"].tolist() == list(range(0, last, 10))
        assert rows["end"].tolist() == list(range(10, last + 10, 10))
        held = [10, 20, 30, 40] if cache == FULL else [10, *[16] * 5]
        per_token = 2 * 2 * 4 * 16 * 4  # keys and values, layers, heads, channels, float32
        assert (rows["bytes"] / per_token).tolist() == held
    assert table[["capacity", "n_sink"]].drop_duplicates().to_numpy().tolist() == [[15, 2]]
    full = losses_at_once(model, text, range(40)).unflatten(0, (4, 10)).mean(1)
    assert rows_of(table, FULL)["loss"].to_numpy() == pytest.approx(full.numpy(), abs=1e-4)
    recomputed = streams.recomputed_losses(model, text, 16).unflatten(0, (6, 10)).mean(1)
    found = rows_of(table, RECOMPUTED)["loss"].to_numpy()
    assert found == pytest.approx(recomputed.numpy(), abs=1e-6)


def test_positions_matter_once_tokens_are_evicted(table):
    caches = (WINDOW, SINKS, streams.IN_CACHE)
    window, original, turned = (rows_of(table, cache)["loss"].tolist() for cache in caches)
    assert window[0] == original[0] == turned[0]
    assert window[2:] != original[2:] != turned[2:]


# ---- what is told --------------------------------------------------------------------------------


def made_up(**losses):
    """A table in which each cache has one loss, but for rounding, and a full cache gets slower.

    Args:
        losses: of the window, w; of sinks + window, s, and with original positions, o.
    """
    named = {WINDOW: "w", streams.IN_CACHE: "s", SINKS: "o"}
    rows = [
        cache._asdict()
        | {"first": first, "end": first + 10, "bytes": 1024}
        | {"loss": losses.get(named.get(cache), 2.0) + first / 1000}
        | {"quick_ms": 3 + first * (cache == FULL), "quick_ms_alone": 1.5}
        for cache in (*STREAMED, RECOMPUTED)
        for first in range(0, 160, 10)
    ]
    table = pd.DataFrame(rows).assign(model="made up", guessing=6.0, capacity=15, n_sink=2)
    table["loss"] += np.random.default_rng(0).normal(0, 1e-3, len(table))
    return table


@pytest.mark.parametrize(("losses", "verdicts", "numbers"), CASES["lost"])
def test_what_each_stream_loses_is_told(losses, verdicts, numbers):
    found = streaming.find_sinks(made_up(**losses))
    assert [finding.name for finding in found] == ["sinks", "window", "positions"]
    assert [finding.verdict for finding in found] == verdicts
    assert [finding.number for finding in found] == pytest.approx(numbers, abs=5e-3)


def test_a_difference_within_its_interval_is_undecided():
    table = made_up()
    noisy = (table["cache"] == WINDOW.cache) & (table["first"] == 100)
    table.loc[noisy, "loss"] += 30
    alone = streaming.find_sinks(table)[1]
    assert "A window alone is undecided: **+2." in alone.text
    assert alone.verdict is None


def test_neighbouring_stretches_count_as_one():
    def interval(losses):
        rows = [
            cache._asdict() | {"first": first, "capacity": 0, "loss": loss}
            for cache, factor in ((WINDOW, 1), (RECOMPUTED, 0))
            for first, loss in enumerate(factor * losses, start=1)
        ]
        return streaming.lost(pd.DataFrame(rows), WINDOW)

    losses = np.random.default_rng(0).normal(size=12)
    assert interval(losses.repeat(10)) == pytest.approx(interval(losses))


def test_a_model_that_guesses_has_nothing_to_lose():
    (found,) = streaming.find_sinks(made_up().assign(guessing=2.1))
    assert "uniform guess" in found.text


def test_slowing_down_is_told_apart_from_a_slower_machine():
    table = made_up()
    assert streaming.slowdown(rows_of(table, FULL)) == pytest.approx(138 / 58)
    table.loc[table["first"] >= 100, ["quick_ms", "quick_ms_alone"]] *= 4
    pace, growth = streaming.find_pace(table), streaming.find_growth(table)
    assert "2.38 in a full one of " in pace.text
    assert "full" not in streaming.find_pace(table[table["cache"] != FULL.cache]).text
    assert (pace.number, growth.number, growth.verdict) == (1, 1, "works")
    table.loc[table["first"] == 150, "bytes"] *= 3
    assert streaming.find_growth(table).verdict == "breaks"


def test_the_table_and_the_figure_have_a_line_per_cache(table):
    tables = {"streaming": table}
    text = EXPERIMENT.markdown(tables)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines[1:]] == [f"| {cache}" for cache in STREAMED]
    assert "nan" not in text
    figure = EXPERIMENT.figures(tables)["streaming"]
    (panel,), (legend,) = figure.axes, figure.legends
    drawn = [line for line in panel.get_lines() if len(line.get_xdata()) > 2]
    assert len(drawn) == len(STREAMED)
    losses = [rows_of(table, cache)["loss"].to_numpy() for cache in (WINDOW, RECOMPUTED)]
    assert drawn[1].get_ydata() == pytest.approx(losses[0] - losses[1])
    assert [text.get_text() for text in legend.get_texts()] == list(map(str, STREAMED))


# ---- command -------------------------------------------------------------------------------------


def test_sizes_follow_the_model(model):
    stretch = Options.tokens // 80
    by_model = {"capacity": 1023, "full": 4 * 4096, "stretch": stretch}
    assert size_for(model, Options()) == streams.Size(Options.tokens, **by_model)
    shipped, _ = load_model("stdlib-neox")
    assert size_for(shipped, Options()) == streams.Size(Options.tokens, stretch=stretch)
    given = Options(tokens=500, capacity=31, n_sink=1, full=64)
    assert size_for(shipped, given) == streams.Size(500, 31, 64, 1)
