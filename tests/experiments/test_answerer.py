"""Questions about compressed contexts: what is answered, under which scopes, generated how."""

import copy

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, QuantizedCache, set_seed

import hooks_impl
from experiments import UserError
from experiments.answers.compressed import compressed
from experiments.loading import load_model
from experiments.pipeline import ContextAnswerer
from experiments.testbed.facts import answer_seen, answer_unseen, build_tokenizer
from press_core import kept_lengths
from press_core.cache.caches import HybridLayer
from tests.decoders import tiny_decoder
from tests.experiments.asked import PRESSES, facts, uneven
from tests.experiments.tiny import CASES
from tests.support import GREEDY, both, filled, in_turn, snapshot, token_ids, unchanged
from tests.twins import contents, same

MODEL, DTYPE = "facts-llama", torch.float64  # no rounding error decides an answer
STAY_OPEN = {"adakv", "pyramid", "channels", "decoding", "streaming", "dms", "kvzip"}


@pytest.fixture
def text():
    return facts(1)[1][0]


# ---- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "together"),
    [
        *((name, False) for name in ("none", "snapkv", "adakv", "rerotated", "dms", "kvzip")),
        *((name, True) for name in ("none", "snapkv", "adakv")),
    ],
)
def test_answers_are_those_from_the_pruned_cache(model, answerer, package, name, together):
    batch, texts = facts()
    press = PRESSES[name](package)
    answers = (answer_seen if together else answer_unseen)(model, press, batch)
    expected = [[answerer.tokenizer.decode(token) for token in row] for row in answers]
    asked = [text.questions[: len(row)] for text, row in zip(texts, expected, strict=True)]
    options = {"press": press, "compress_questions": together, "max_new_tokens": 1}
    assert answerer([t.context for t in texts], asked, **options) == expected


def test_the_share_that_is_evicted_while_decoding_is_one_of_all_tokens(answerer, package):
    """All but the last, which is not read: of these 20 are held, and the latest."""
    press, (text, *_) = package.StreamingLLMDecodingPress(max_capacity=20), facts()[1]
    asked, options = text.questions[0], {"max_new_tokens": 5, "min_new_tokens": 5}
    found = answerer.answered(text.context, [asked], press=press, **options)
    n_read = sum(len(answerer.tokenizer(t).input_ids) for t in (text.context, asked)) - 1 + 4
    assert found.evicted == pytest.approx(1 - 21 / n_read)


@in_turn("name, together", PRESSES, [False, True])
def test_rows_of_a_batch_are_those_of_the_row_alone(answerer, package, name, together):
    """What they answer, and the share of their tokens that was really evicted."""
    texts = facts(2)[1]
    contexts = uneven(texts)
    questions = [t.questions[: 1 if together else 2] for t in texts]
    questions[1] = [f"{asked} ? bob" for asked in questions[1]]  # of another length
    options = {"press": PRESSES[name](package), "max_new_tokens": 4}
    options["compress_questions"] = together
    found = answerer.answered(contexts, questions, **options)
    alone = [answerer.answered(c, q, **options) for c, q in zip(contexts, questions, strict=True)]
    assert found.answers == [row for each in alone for row in each.answers]
    shares = [each.evicted for each in alone]
    assert found.evicted == pytest.approx(sum(shares) / 2, abs=1e-6)
    if name in ("none", "channels"):
        assert shares == [0, 0]
        return
    assert 0 < max(shares) < 0.8  # short contexts fit into what some presses keep
    if name in ("snapkv", "rerotated"):
        for context, (asked, *_), share in zip(contexts, questions, shares, strict=True):
            length = len(answerer.tokenizer(f"{context} {asked if together else ''}").input_ids)
            kept = int(length * (0.5 if name == "snapkv" else 0.6))
            assert share == pytest.approx(1 - kept / length)


@in_turn("name", PRESSES)
def test_no_question_sees_another(answerer, text, package, name):
    options = {"press": PRESSES[name](package), "max_new_tokens": 3}
    questions = [*text.questions, "? alice ? bob " * 30]  # of other lengths too
    at_once = answerer(text.context, questions, **options)
    assert at_once == answerer(text.context, questions[::-1], **options)[::-1]
    assert at_once == [answerer(text.context, [q], **options)[0] for q in questions]


@pytest.mark.skipif(HybridLayer is None, reason="transformers 5.2 has no such layer")
def test_no_question_sees_the_linear_state_of_another():
    model = tiny_decoder("falcon_h1")
    with compressed(model, token_ids(2, 40).tolist(), hooks_impl.KnormPress(0.5), 0) as context:
        alone = context.generate([1], [[7, 8]], GREEDY | {"max_new_tokens": 4})
        context.generate([0, 1], [[9], [9]], GREEDY | {"max_new_tokens": 4})
        assert context.generate([1], [[7, 8]], GREEDY | {"max_new_tokens": 4}) == alone


@in_turn("name", [name for name in PRESSES if name != "finch"])
def test_a_given_cache_holds_the_compressed_context_and_no_question(
    model, answerer, text, package, name
):
    press, cache = PRESSES[name](package), DynamicCache(config=model.config)
    ids = answerer.tokenizer(text.context, return_tensors="pt").input_ids
    expected = filled(model, press, ids)
    answerer(text.context, text.questions, press=press, cache=cache, max_new_tokens=4)
    assert same(contents(cache), contents(expected))


def test_a_cache_with_something_in_it_is_refused(model, answerer):
    cache = DynamicCache(config=model.config)
    answerer("river alice tea", ["? alice"], cache=cache, max_new_tokens=1)
    with pytest.raises(UserError, match="holds 4 tokens"):
        answerer("river alice tea", ["? alice"], cache=cache)


@both
def test_quantized_caches(text, package):
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    answerer = ContextAnswerer(*load_model("facts-llama"))
    press = package.SnapKVPress(0.3, window_size=8)
    config, found = answerer.model.config, []
    for _ in range(2):
        cache = QuantizedCache("quanto", config, nbits=4, q_group_size=16, residual_length=8)
        options = {"press": press, "cache": cache, "max_new_tokens": 1}
        found.append(answerer(text.context, text.questions, **options))
        assert {int(n) for kept in kept_lengths(cache) for n in kept.flatten()} == {int(49 * 0.7)}
    assert found[0] == found[1]


# ---- Finch -------------------------------------------------------------------------------------


@both
def test_finch_gets_its_delimiter(model, answerer, text, package):
    """What the pipeline keeps is what a prompt with a delimiter written by hand keeps."""
    tokenizer, press = build_tokenizer(), package.FinchPress(0.5, rerotate_keys=False)
    cache = DynamicCache(config=model.config)
    answerer(text.context, text.questions[:1], press=press, cache=cache, max_new_tokens=1)
    assert press == package.FinchPress(0.5, rerotate_keys=False)
    press.update_model_and_tokenizer(model, tokenizer)
    assert press.delimiter_token == "<|finch_sep|>"
    prompt = f"{text.context} <|finch_sep|> {text.questions[0]}"
    expected = filled(model, press, tokenizer(prompt, return_tensors="pt").input_ids)
    for one, other in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(one.positions, other.positions)
        assert torch.equal(one.keys, other.keys)


# ---- scopes ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", PRESSES)
def test_the_press_is_open_as_long_as_it_is_needed(model, answerer, text, package, name):
    clean, seen = snapshot(model), []

    def look(_, args, kwargs):
        if kwargs.get("cache", kwargs.get("past_key_values")).get_seq_length():
            seen.append(snapshot(model) != during_nothing)

    with model.register_forward_pre_hook(look, with_kwargs=True):
        during_nothing = snapshot(model)
        options = {"press": PRESSES[name](package), "max_new_tokens": 2}
        answerer(text.context, text.questions[:1], **options)
        unpadded = set(seen)
        seen.clear()
        answerer([text.context, "river " + text.context], text.questions[:1], **options)
    assert unpadded == {name in STAY_OPEN}
    assert set(seen) == {name != "none"}  # a padded batch that was pruned needs its mask
    assert snapshot(model) == clean


@both
def test_an_error_leaves_nothing_open(model, answerer, package):
    options = {"press": package.KnormPress(0.5), "temperature": "hot", "do_sample": True}
    with unchanged(model), pytest.raises(ValueError, match="temperature"):
        answerer("river alice tea", ["? alice"], **options)


# ---- generation --------------------------------------------------------------------------------


BEAMS = {"generation_config": GenerationConfig(num_beams=3, num_return_sequences=2)}


@pytest.mark.parametrize("options", [*CASES["generation"], BEAMS])
def test_without_a_press_it_is_generate(model, answerer, text, options):
    prompt = answerer.tokenizer(f"{text.context} {text.questions[0]}", return_tensors="pt")
    set_seed(1)
    expected = model.generate(**prompt, max_new_tokens=5, **options)[:, prompt.input_ids.shape[1] :]
    set_seed(1)
    (found,) = answerer(text.context, text.questions[:1], max_new_tokens=5, **options)
    expected = [answerer.tokenizer.decode(row) for row in expected]
    assert found == (expected if len(expected) > 1 else expected[0])


def test_it_is_greedy_unless_asked_to_be_otherwise(model, answerer, text, monkeypatch):
    ask = text.context, text.questions[:1]
    expected = answerer(*ask, max_new_tokens=8, do_sample=False)
    hot = copy.deepcopy(model.generation_config)
    hot.do_sample, hot.temperature, hot.num_return_sequences = True, 50.0, 2
    monkeypatch.setattr(model, "generation_config", hot)
    few = GenerationConfig(max_new_tokens=8)
    for others in ({"max_new_tokens": 8}, {"generation_config": few}):
        assert [answerer(*ask, **others) for _ in range(4)] == [expected] * 4
    for asked in ({"do_sample": True, "temperature": 50.0}, {"generation_config": hot}):
        assert answerer(*ask, max_new_tokens=8, **asked) != expected


@pytest.mark.parametrize("in_config", [False, True])
def test_answers_end_before_the_end_of_sequence(answerer, text, in_config):
    """Also where a batch goes on, and fills the rows that have ended with that token."""
    (long,) = answerer(text.context, text.questions[:1], max_new_tokens=6)
    end = answerer.tokenizer.convert_tokens_to_ids(long.split()[2])
    options = {"max_new_tokens": 4, "eos_token_id": end, "pad_token_id": end}
    options = {"generation_config": GenerationConfig(**options)} if in_config else options
    contexts = [text.context, "river alice tea of"]
    (short,), (other,) = answerer(contexts, text.questions[:1], **options)
    assert short.split() == long.split()[: long.split().index(long.split()[2])]
    assert len(other.split()) == 4
