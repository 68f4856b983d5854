"""Contexts that were compressed and saved answer as they would have at once."""

import os

import pytest
import torch
from transformers import pipeline

import hooks_impl
import patch_impl
from experiments import UserError
from experiments.pipeline import TASK, ContextAnswerer, SavedContext
from experiments.testbed.facts import draw
from press_core import CacheFileError, about_cache, save_cache
from tests.experiments.tiny import CASES, cli, refused, succeeded
from tests.presses import PIPELINE_PRESSES
from tests.support import in_turn, unchanged

MODEL = "facts-llama"
ACT_LATER = {"decoding", "streaming", "dms"}
TEMPLATE = "{% for m in messages %}river {{ m.content }}{% endfor %} stone"


FACTS = [draw(1, n, 4, torch.Generator().manual_seed(n)).text(0) for n in (48, 40, 61)]
TEXTS = [facts.context for facts in FACTS]
QUESTIONS = [[facts.questions[0], facts.questions[1] + " of"] for facts in FACTS]
"""About each text as many, of different lengths."""


@in_turn("name", PIPELINE_PRESSES)
def test_several_contexts(answerer, name, package, tmp_path):
    press, path = PIPELINE_PRESSES[name](package), tmp_path / "contexts.safetensors"
    again = press if name in ACT_LATER else None
    with unchanged(answerer.model):
        at_once = answerer.answered(TEXTS, QUESTIONS, press=press, max_new_tokens=6)
        answerer.save(TEXTS, path, press=press)
        later = answerer.answered(SavedContext(path), QUESTIONS, press=again, max_new_tokens=6)
    assert later.answers == at_once.answers
    assert later.evicted == pytest.approx(at_once.evicted)
    assert about_cache(path).press == (None if press is None else repr(press))


def test_the_pipeline(model, tokenizer, tmp_path):
    pipe = pipeline(TASK, model=model, tokenizer=tokenizer)
    press = patch_impl.KnormPress(0.3)
    text, questions = TEXTS[0], QUESTIONS[0]
    at_once = pipe(text, questions=questions, press=press, max_new_tokens=2)
    saved = ContextAnswerer(model, tokenizer).save(text, tmp_path / "a", press=press)
    assert pipe(saved, questions=questions, max_new_tokens=2) == at_once
    first = pipe(saved, question=questions[0], max_new_tokens=2)
    assert first == {"answer": at_once["answers"][0]}
    assert set(pipe(saved, max_new_tokens=2)) == {"answer"}


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_a_file_gets_the_permissions_of_the_umask(answerer, tmp_path, umask):
    former = os.umask(umask)
    try:
        answerer.save("river alice tea of", tmp_path / "a", press=hooks_impl.KnormPress(0.5))
    finally:
        os.umask(former)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~umask


def test_what_a_template_puts_after_the_question_is_kept(answerer, tmp_path):
    answerer.tokenizer.chat_template = TEMPLATE
    path, press = tmp_path / "context.safetensors", hooks_impl.KnormPress(0.3)
    options = {"max_new_tokens": 4, "answer_prefix": "of"}
    found = answerer(TEXTS[0], QUESTIONS[0], press=press, **options)
    answerer.save(TEXTS[0], path, press=press)
    answerer.tokenizer.chat_template = None
    assert about_cache(path).notes["tails"] == [" stone"]
    assert answerer(SavedContext(path), QUESTIONS[0], **options) == found


def test_what_is_refused(answerer, tmp_path):
    path, saved = tmp_path / "a", SavedContext(tmp_path / "a")

    def refused(match, *args, error=UserError, **options):
        with pytest.raises(error, match=match):
            answerer(*args, max_new_tokens=1, **options)

    knorm = hooks_impl.KnormPress(0.5)
    for press, words in (
        (hooks_impl.FinchPress(0.4), "FinchPress needs the question"),
        (hooks_impl.H2OPress(0.5), "H2OPress remembers more"),
    ):
        with pytest.raises(UserError, match=words):
            answerer.save(TEXTS[0], path, press=press)
    refused("there is no file", saved, QUESTIONS[0], error=CacheFileError)
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(CacheFileError, match="is there already"):
        answerer.save(TEXTS[0], path, press=knorm)
    assert path.read_text() == "mine"
    path.unlink()
    answerer.save(TEXTS[0], path, press=knorm)
    refused("is compressed already", saved, QUESTIONS[0], press=knorm)
    for name, value in (("cache", object()), ("max_context_length", 9)):
        refused(f"{name} .*SavedContext", saved, QUESTIONS[0], **{name: value})
    refused("the question takes", saved, [" of" * 5000])


def test_a_press_that_goes_on_is_asked_for(answerer, tmp_path):
    path = tmp_path / "a"
    answerer.save(TEXTS[0], path, press=PIPELINE_PRESSES["decoding"](hooks_impl))
    for other in (None, hooks_impl.KnormPress(0.5)):
        with pytest.raises(UserError, match=r"DecodingPress\(.*again"):
            answerer(SavedContext(path), QUESTIONS[0], press=other)


def test_a_cache_that_nobody_has_asked_about(answerer, model, tmp_path):
    """Saved without its texts."""
    cache = model(torch.arange(3, 40)[None], use_cache=True).past_key_values
    save_cache(cache, tmp_path / "a", model)
    with pytest.raises(UserError, match="texts"):
        answerer(SavedContext(tmp_path / "a"), ["? alice"])


# ---- on the command line -------------------------------------------------------------------------


def test_compress_and_ask(tmp_path):
    text, path = tmp_path / "context.txt", tmp_path / "context.safetensors"
    text.write_text("river alice tea garden over hector lamp morning " + TEXTS[0])
    press = "SnapKVPress(window_size=8)"
    done = succeeded(
        "compress", "--context", text, "--press", press, "--ratio", 0.5, "--output", path
    )
    said = "57 tokens, 51% evicted by SnapKVPress(compression_ratio=0.5, window_size=8"
    assert said in done.stdout.replace("\n", "")
    done = cli("ask", "--cache", path, "--question", "? alice", "--question", "? hector",
               "--max-new-tokens", 1)  # fmt: skip
    assert done.stdout.splitlines() == ["tea", "lamp"]


COMPRESSED = CASES["compressed"]


@pytest.mark.parametrize(("press", "evicted", "said"), COMPRESSED.values(), ids=COMPRESSED)
def test_a_text_from_standard_input_loses_half_if_nothing_is_said(tmp_path, press, evicted, said):
    path, text = tmp_path / "a", "river alice tea " + "meadow march " * 40
    done = succeeded("compress", "--output", path, *press, input=text)
    assert (about_cache(path).n_seen, about_cache(path).evicted) == (84, evicted)
    words = "--ratio 0.5", "short", "while decoding"
    assert [word for word in words if word in done.stderr] == said


def test_a_cache_in_16_bits(tmp_path):
    path, text = tmp_path / "a", tmp_path / "text"
    text.write_text("river alice tea " + "meadow march " * 90)
    succeeded("compress", "--output", path, "--context", text, "--dtype", "bfloat16")
    assert "dtype is bfloat16" in refused("ask", "--cache", path, "--question", "? alice")
    done = cli("ask", "--cache", path, "--question", "? alice", "--dtype", "bfloat16",
               "--max-new-tokens", 1)  # fmt: skip
    assert done.stdout.split() == ["tea"]


def test_what_the_commands_refuse(tmp_path):
    path, text = tmp_path / "a", tmp_path / "text"
    text.write_bytes(b"\xff\xfe")
    refusals = {
        "is there already": ("compress", "--output", text, "--context", text),
        "is no text in UTF-8": ("compress", "--output", path, "--context", text),
        "Is a directory: ": ("compress", "--output", path, "--context", tmp_path),
        "there is no file": ("compress", "--output", path, "--context", path),
        "there is no press": ("compress", "--output", path, "--press", "X", "--context", text),
        "is no compressed cache": ("ask", "--cache", text, "--question", "? alice"),
    }
    for said, arguments in refusals.items():
        assert said in refused(*arguments)
    assert not path.exists()
