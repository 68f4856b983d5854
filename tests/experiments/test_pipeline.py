"""Many questions about one compressed context: the same answers as by hand, and nothing left."""

import copy

import pytest
import torch
from transformers import DynamicCache, pipeline

import hooks_impl
from experiments import UserError
from experiments.pipeline import TASK, ContextAnswerer
from press_core import kept_lengths
from tests.experiments.asked import PRESSES, facts, uneven
from tests.support import both, in_turn, snapshot, table_beside

MODEL, DTYPE = "facts-llama", torch.float64  # no rounding error decides an answer
BAD_INPUT = table_beside(__file__, "bad_pipeline_input")


# ---- text --------------------------------------------------------------------------------------


def text_read(answerer, *args, **options):
    """All that the model reads before it answers."""
    read = []

    def look(_, args, kwargs):
        read.extend(kwargs["input_ids"][0].tolist())

    with answerer.model.register_forward_pre_hook(look, with_kwargs=True):
        answerer(*args, max_new_tokens=1, **options)
    return answerer.tokenizer.decode(read)


@pytest.mark.parametrize("content", ["message.content", "message.content | trim"])
@pytest.mark.parametrize("together", [False, True])
def test_a_chat_template_goes_around_context_and_question(answerer, content, together):
    answerer.tokenizer.chat_template = (
        "<bos>{% for message in messages %}open {{ " + content + " }} close{% endfor %}"
        "{% if add_generation_prompt %} north {{ mood }}{% endif %}"
        "{% if enable_thinking is not defined %} wrong{% elif enable_thinking %} near{% endif %}"
    )
    options = {"compress_questions": together}
    more = {"template_options": {"mood": "quiet"}, "answer_prefix": " same"}
    read = text_read(answerer, "river alice tea", [" ? alice"], **options, **more)
    assert read == "<bos> open river alice tea ? alice close north quiet same"
    read = text_read(answerer, "river", [" ? alice"], **options, enable_thinking=True)
    assert read == "<bos> open river ? alice close north near"
    plain = text_read(answerer, "river alice tea", ["? alice"], chat_template=False)
    assert plain == "<bos> river alice tea ? alice"


def test_each_context_may_have_an_answer_prefix(model, answerer):
    contexts = ["river alice tea of", "river helen drum of"]
    found = answerer(contexts, [""], answer_prefix=["? alice", "? helen"], max_new_tokens=1)
    assert found == [["tea"], ["drum"]]


def test_long_contexts_lose_their_middle_and_say_so(answerer, caplog):
    context = " ".join(["river"] * 20 + ["alice", "tea"] + ["stone"] * 20)
    text_read(answerer, context, ["? alice"], max_context_length=43)
    assert not caplog.records
    read = text_read(answerer, context, ["? alice"], max_context_length=11)
    assert read == "<bos> river river river river <unk> <unk> <unk> <unk> <unk> <unk> ? alice"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("a context of 43 tokens is cut to 11")


@pytest.mark.parametrize("saved", [False, True])
def test_answers_end_where_the_model_has_no_more_positions(
    model, answerer, monkeypatch, caplog, tmp_path, package, saved
):
    """Each row's own answer: its last token is not read, and takes no position."""
    contexts = ["river " * 20, "river " * 24, "river " * 24]  # and one token before each
    monkeypatch.setattr(model.config, "max_position_embeddings", 32)
    press = package.KnormPress(0.5)
    if saved:
        contexts, press = answerer.save(contexts, tmp_path / "a", press=press), None

    def lengths(**options):
        answers = answerer(contexts, ["? alice"], press=press, **options)
        return [len(row[0].split()) for row in answers]

    assert lengths(max_new_tokens=6) == [6, 6, 6]
    assert not caplog.records
    assert lengths(max_new_tokens=9, eos_token_id=[]) == [9, 6, 6]
    assert "6 tokens, not 9" in caplog.text


def test_a_configuration_that_asks_for_more_than_texts(model, answerer, monkeypatch):
    monkeypatch.setattr(model.generation_config, "return_dict_in_generate", True)
    assert answerer("river alice tea of", ["? alice"], max_new_tokens=1) == ["tea"]


@in_turn("together", [False, True])
def test_a_budget_is_kept_of_every_context(model, answerer, package, together):
    """Of each row of a padded batch, by presses told a ratio, a number, or how much to keep."""
    _, texts = facts(2)
    contexts, questions = uneven(texts), [text.questions[:2] for text in texts]
    options = {"compress_questions": together, "max_new_tokens": 1, "answer_prefix": None}
    for name in ("snapkv", "adakv", "finch"):
        given, cache = PRESSES[name](package).with_budget(20), DynamicCache(config=model.config)
        answerer(contexts, questions, press=given, cache=cache, **options)
        if not together and name != "finch":  # else the cache has been copied
            kept = torch.stack(kept_lengths(cache)).double().mean(dim=(0, 2))
            assert kept.tolist() == [20.0, 20.0]
    large = PRESSES["snapkv"](package).with_budget(500)
    assert answerer.answered(contexts, questions, press=large).evicted == 0


@both
@pytest.mark.parametrize("press", [None, "KnormPress"])
@pytest.mark.parametrize("questions", [None, [""]])
@pytest.mark.parametrize("context", ["river alice tea ? alice", "", " \n"])
def test_without_a_question_or_a_context_the_text_goes_on(
    model, answerer, package, press, questions, context
):
    pressed = getattr(package, press)(0.0) if press else None
    ids = answerer.tokenizer(context, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=3)[0, ids.shape[1] :]
    options = {"press": pressed, "max_new_tokens": 3}
    for together in (False, True):
        found = answerer(context, questions, compress_questions=together, **options)
        assert found == [answerer.tokenizer.decode(expected)]


def test_a_blank_context_is_answered(answerer):
    (blank, other) = answerer(["", "river alice tea"], ["? alice"], max_new_tokens=1)
    assert blank == answerer("", ["? alice"], max_new_tokens=1)
    assert other == ["tea"]


def test_a_text_of_no_tokens_starts_with_something_or_is_refused(answerer, monkeypatch):
    known, expected = answerer.tokenizer, answerer("", ["? alice"], max_new_tokens=2)

    class Startless:
        bos_token_id, eos_token_id = known.bos_token_id, None

        def __call__(self, text, add_special_tokens=True):
            return known(text, add_special_tokens=False)

        def __getattr__(self, name):
            return getattr(known, name)

    answerer.tokenizer = Startless()
    assert answerer("", ["? alice"], max_new_tokens=2) == expected
    monkeypatch.setattr(Startless, "bos_token_id", None)
    with pytest.raises(UserError, match="at least one word"):
        answerer("", ["? alice"])


def test_shorter_rows_need_something_to_be_filled_with(model, answerer):
    contexts = ["river alice tea of", "of of alice tea of"]
    expected = answerer(contexts, ["? alice"], max_new_tokens=1)
    answerer.tokenizer.pad_token = None
    with pytest.raises(UserError, match=r"tokenizer\.pad_token"):
        answerer(contexts, ["? alice"], max_new_tokens=1)
    assert answerer(contexts[:1] * 2, ["? alice"], max_new_tokens=1) == expected[:1] * 2
    answerer.tokenizer.eos_token = "near"
    assert answerer(contexts, ["? alice"], max_new_tokens=1) == expected


REFUSED = table_beside(__file__, "refusals")


@pytest.mark.parametrize(
    ("contexts", "questions", "options", "words"),
    [
        *REFUSED["questions"],
        ("river", ["of " * 2048], {}, "question .*2048 tokens.* 2048 positions"),
        ("of " * 2048, ["? a"], {"answer_prefix": " of"}, "2049 and 3 .*_length=2045"),
        ("river", ["? a"], {"press": hooks_impl.KnormPress}, "give a press of hooks_impl"),
        ("river", None, {"press": hooks_impl.FinchPress(0.5)}, "question"),
        ("river", ["? a", ""], {"press": hooks_impl.FinchPress(0.5)}, "question"),
    ],
)
def test_bad_input_is_refused_in_words(answerer, contexts, questions, options, words):
    with pytest.raises(UserError, match=words):
        answerer(contexts, questions, **options)


# ---- the pipeline of transformers --------------------------------------------------------------


@pytest.fixture
def pipe(model, tokenizer):
    return pipeline(TASK, model=model, tokenizer=tokenizer)


def test_the_pipeline_answers_as_the_class_does(answerer, pipe, package):
    texts = facts()[1]
    contexts, questions = uneven(texts), [list(t.questions) for t in texts]
    options = {"press": package.AdaKVPress(package.SnapKVPress(0.5, window_size=8))}
    options |= {"max_new_tokens": 2}
    expected = answerer(contexts, questions, **options)
    asked = pipe(contexts[0], question=questions[0][1], **options)
    assert asked == {"answer": expected[0][1]}
    assert pipe(contexts[0], questions=questions[0], **options) == {"answers": expected[0]}
    several = [{"answers": row} for row in expected]
    for size in (1, 2, 3):
        assert pipe(contexts, questions=questions, batch_size=size, **options) == several
    items = ({"context": c, "questions": q} for c, q in zip(contexts, questions, strict=True))
    assert list(pipe(items, **options)) == several
    for given in (contexts, [{"context": context} for context in contexts]):
        same = pipe(given, question=questions[0][0], batch_size=3, **options)
        assert same[0] == {"answer": expected[0][0]}


@pytest.mark.parametrize(("inputs", "options", "words"), BAD_INPUT)
def test_the_pipeline_refuses_bad_input(pipe, inputs, options, words):
    with pytest.raises(UserError, match=words):
        pipe(inputs, **options)


def test_the_pipeline_goes_on_where_nothing_is_asked(pipe):
    expected = pipe("river alice tea of", question="? alice", max_new_tokens=1)
    assert pipe("river alice tea of ? alice", max_new_tokens=1) == expected == {"answer": "tea"}
    assert pipe(["river alice tea of ? alice"], question="", max_new_tokens=1) == [expected]
    assert pipe("", question="? alice", max_new_tokens=1).keys() == {"answer"}


def test_the_pipeline_loads_a_model_by_its_path():
    pipe = pipeline(TASK, model="experiments/models/facts-llama")
    assert pipe("river alice tea of", question="? alice", max_new_tokens=1) == {"answer": "tea"}


# ---- models that are spread over devices -------------------------------------------------------


def touched(model):
    """A snapshot but for the weights, which accelerate brings and takes away."""
    return {key: value for key, value in snapshot(model).items() if "_parameters" not in key}


@in_turn("name", ["snapkv", "adakv", "finch", "kvzip", "decoding"])
def test_models_whose_weights_are_on_a_disk(model, answerer, tmp_path, package, name):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    texts = facts()[1]
    options = {"press": PRESSES[name](package), "max_new_tokens": 3}
    args = uneven(texts), [t.questions[:2] for t in texts]
    offloaded = accelerate.disk_offload(copy.deepcopy(model), tmp_path, torch.device("cpu"))
    before = touched(offloaded)
    found = ContextAnswerer(offloaded, answerer.tokenizer)(*args, **options)
    assert found == answerer(*args, **options)
    assert touched(offloaded) == before
