"""Samples that are generated and samples that are published, and how they are scored."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest

from experiments import UserError
from experiments.answers import metrics
from experiments.answers.cells import Cell, run_cell
from experiments.answers.datasets import SOURCES, contexts_of, expand
from experiments.answers.datasets import load as load_samples
from experiments.answers.datasets.published import SETS
from experiments.answers.metrics import METRICS, UNKNOWN, score
from experiments.answers.sample import Sample
from experiments.answers.settings import Settings
from experiments.loading import load_model
from tests.experiments.tiny import CASES, REFUSED
from tests.support import table_beside


def load(text, samples, seed, tokenizer, model="model", data=None, **told):
    settings = Settings(samples=samples, seed=seed, model=model, data=data, **told)
    return load_samples(text, settings, tokenizer)


SYNTHETIC = expand("synthetic@1500")
FACTS = expand("facts@64")
SCORES = table_beside(__file__, "metrics")


@pytest.fixture(scope="module")
def facts_tokenizer():
    return load_model("facts-llama")[1]


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("stdlib-neox")[1]


def prompt(sample):
    return sample.context + sample.question + sample.answer_prefix


# ---- generated ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SYNTHETIC)
@pytest.mark.parametrize("words", ["characters", "words"])
def test_samples_are_as_long_as_asked_for(text, words, tokenizer, facts_tokenizer):
    """Whatever a token is: nearly all words are unknown to the second one."""
    chosen = tokenizer if words == "characters" else facts_tokenizer
    samples = load(text, 4, 0, chosen)
    for sample in samples:
        length = len(chosen(prompt(sample))["input_ids"]) + sample.max_new_tokens
        assert 0.9 * 1500 < length <= 1500


@pytest.mark.parametrize("text", [*SYNTHETIC, *FACTS])
def test_a_seed_says_it_all_and_answers_stand_in_the_context_alone(text, facts_tokenizer):
    first, again, other = (load(text, 5, seed, facts_tokenizer) for seed in (0, 0, 1))
    assert first == again
    assert len({(sample.context, sample.question) for sample in first}) == 5
    assert {sample.context for sample in first}.isdisjoint(sample.context for sample in other)
    for sample in first:
        assert score(sample, " ".join(sample.answers)) == 1
        assert score(sample, "nothing of the kind") == 0
        for answer in sample.answers:
            assert answer in sample.context
            assert answer not in sample.question + sample.answer_prefix


@pytest.mark.parametrize(("task", "keys", "values", "asked"), CASES["needles"])
def test_needles(tokenizer, task, keys, values, asked):
    for sample in load(f"synthetic/niah_{task}@1000", 3, 0, tokenizer):
        found = re.findall(r"One secret number of ([\w-]+) is (\d+)\.", sample.context)
        assert Counter(Counter(name for name, _ in found).values()) == {values: keys}
        wanted = [number for name, number in found if name in sample.question]
        assert sorted(wanted) == sorted(sample.answers)
        assert len(wanted) == values * asked
        said = "is the secret number of" if values * asked == 1 else "are the secret numbers of"
        assert said in sample.question


def test_variables_are_those_that_the_chain_reaches(tokenizer):
    for sample in load("synthetic/variable_tracking@1000", 3, 0, tokenizer):
        number = re.search(r"value (\d+)", sample.question)[1]
        held = {}
        for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.context):
            held[name] = held.get(value, value)  # chains are told in their order
        assert {name for name, value in held.items() if value == number} == set(sample.answers)
        assert len(sample.answers) == 5


@pytest.mark.parametrize(("task", "n"), [("common_words", 10), ("frequent_words", 3)])
@pytest.mark.parametrize("length", [1200, 4000])
def test_the_most_common_words_are_so_without_a_tie(tokenizer, task, n, length):
    for sample in load(f"synthetic/{task}@{length}", 3, 0, tokenizer):
        text = sample.context.split("\n", 1)[1].rstrip(".")
        counts = Counter(word for word in text.split() if not word.rstrip(".").isdigit())
        ranked = counts.most_common()
        assert {word for word, _ in ranked[:n]} == set(sample.answers)
        assert ranked[n - 1][1] > ranked[n][1]


def test_questions_are_about_one_person(tokenizer):
    for sample in load("synthetic/qa@1500", 5, 0, tokenizer):
        (portrait,) = [
            line
            for line in sample.context.split("\n")
            if (found := re.match(r"Portrait \d+: (\w+ \w+)", line)) and found[1] in sample.question
        ]
        assert sample.answers[0] in portrait


def test_facts_that_share_a_context_are_asked_of_one_cache(facts_tokenizer):
    samples = load("facts/multiquery@64", 10, 0, facts_tokenizer)
    assert [len(group) for group in contexts_of(samples)] == [4, 4, 2]
    assert len(contexts_of(load("facts/single@64", 10, 0, facts_tokenizer))) == 10


def test_all_tasks_of_a_dataset():
    assert expand("facts") == ["facts/single@512", "facts/multikey@512", "facts/multiquery@512"]
    assert expand("synthetic/qa@100") == ["synthetic/qa@100"]
    assert expand("longbench/hotpotqa") == ["longbench/hotpotqa"]
    counts = {"ruler": 13, "longbench": 21, "longbench-e": 13}
    assert {name: len(expand(name)) for name in counts} == counts


@pytest.mark.parametrize(("text", "words"), REFUSED["datasets"])
def test_datasets_that_are_not_there(text, words):
    with pytest.raises(UserError, match=words):
        expand(text)


def test_what_cannot_be_made(tokenizer, facts_tokenizer):
    with pytest.raises(UserError, match=r"vocabulary .*synthetic"):
        load("facts/single@64", 1, 0, tokenizer, "stdlib-neox")
    with pytest.raises(UserError, match="20 words"):
        load("facts/multikey@20", 1, 0, facts_tokenizer)
    with pytest.raises(UserError, match=r"40 tokens.*length of about \d+"):
        load("synthetic/qa@40", 1, 0, tokenizer, "stdlib-neox")


# ---- published ---------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Writes local copies of repositories; returns the folder that holds them."""
    datasets = pytest.importorskip("datasets", reason="the extra [evaluate] is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()

    def write(name, files, card=""):
        for path, rows in files.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if card:
            (tmp_path / name / "README.md").write_text(f"---\n{card}---\n")
        return str(tmp_path)

    return write


def card_of(task):
    """The card of a repository with a configuration for a task."""
    files = f"  data_files:\n  - split: test\n    path: {task}/test.jsonl\n"
    return f"configs:\n- config_name: {task}\n{files}"


ROW = {"context": "c", "question": "q", "all_classes": None}
PUBLISHED = table_beside(__file__, "published")


@pytest.mark.parametrize("text", list(PUBLISHED))
def test_published_samples_and_their_scores(hub, tokenizer, text):
    case, name = PUBLISHED[text], text.partition("/")[0]
    known, row, folder = SETS[name], case["row"], case.get("folder", "")
    is_problem = "problem" in row
    card = card_of(folder) if known.task_is == "config" else ""
    path = f"{folder}/{known.split}.jsonl".lstrip("/")
    data = hub(name, {path: [row if is_problem else ROW | row]}, card)
    (sample,) = load(text, 9, 0, tokenizer, data=data)
    assert sample.context == ("p" if is_problem else "c")
    assert sample.question == (known.question if is_problem else "q")
    assert sample.answer_prefix == row.get("answer_prefix", "")
    assert sample.max_new_tokens == row.get("max_new_tokens", known.max_new_tokens)
    scores = case["scores"]
    assert {given: score(sample, given) for given in scores} == pytest.approx(scores)


def test_rows_of_other_tasks_are_left_out(hub, tokenizer):
    rows = [ROW | {"task": task, "answer": [task]} for task in ("vt", "qa_1", "vt")]
    data = hub("ruler", {"8192/test.jsonl": rows})
    found = load("ruler/vt@8192", 9, 0, tokenizer, data=data)
    assert [sample.answers for sample in found] == [("vt",), ("vt",)]
    with pytest.raises(UserError, match=rf"no rows .*'cwe' in {data}"):
        load("ruler/cwe@8192", 9, 0, tokenizer, data=data)


def test_zero_scrolls_has_no_answers(hub, facts_tokenizer):
    rows = [{"context": "river alice tea", "question": "? alice", "task": "qasper"}]
    data = hub("zero_scrolls", {"test.jsonl": rows})
    (sample,) = load("zero_scrolls/qasper", 9, 0, facts_tokenizer, data=data)
    assert score(sample, "anything") is None
    settings = Settings(data=data, threads=1, max_new_tokens=1)
    result = run_cell(settings, Cell("zero_scrolls/qasper", "no press", 0.0, "bare"))
    assert [(row.prediction, row.score) for row in result.predictions] == [("tea", None)]
    assert result.summary()["score"] is None


def test_questions_of_a_published_set_are_chosen_by_the_seed(hub, facts_tokenizer):
    rows = [{"problem": f"p{i}", "answer": str(i)} for i in range(40)]
    data = hub("math500", {"test.jsonl": rows})

    def chosen(samples, seed=0):
        found = load("math500/math", samples, seed, facts_tokenizer, data=data)
        return [sample.context for sample in found]

    assert [len(set(chosen(n))) for n in (3, 10, 50)] == [3, 10, 40]
    assert chosen(10) == chosen(10) != chosen(10, seed=1)


def test_answers_are_as_long_as_asked_for():
    settings = Settings(dataset=("facts/single@48",), samples=2, threads=1)
    cell = Cell("facts/single@48", "no press", 0.0, "bare")

    def lengths(**changed):
        rows = run_cell(replace(settings, **changed), cell).predictions
        return [len(row.prediction.split()) for row in rows]

    assert lengths() == [1, 1]
    assert lengths(max_new_tokens=3) == [3, 3]
    assert lengths(generation={"max_new_tokens": 2}) == [2, 2]
    assert lengths(generation={"max_new_tokens": 2}, max_new_tokens=3) == [3, 3]


def test_the_columns_of_the_original_longbench_will_do(hub, tokenizer):
    row = {"input": "who?", "context": "c", "answers": ["x"], "all_classes": None, "_id": "1"}
    data = hub("longbench", {"qasper/test.jsonl": [row]}, card_of("qasper"))
    (sample,) = load("longbench/qasper", 9, 0, tokenizer, data=data)
    assert sample == Sample("c", "who?", ("x",), "f1", 64)


def test_a_needle_in_essays(hub, tokenizer):
    essays = [{"title": str(i), "text": "This is a sentence of an essay. " * 40} for i in range(9)]
    data = hub("needle", {"train.jsonl": essays})
    samples = load("needle@512", 5, 0, tokenizer, data=data)
    depths = [sample.context.index("The keeper") / len(sample.context) for sample in samples]
    assert depths == pytest.approx([0, 0.25, 0.5, 0.75, 0.95], abs=0.06)
    for sample in samples:
        assert len(tokenizer(prompt(sample))["input_ids"]) == pytest.approx(496, abs=25)
        assert score(sample, " under the blue flower pot.") == 1
    with pytest.raises(UserError, match=r"\d+ tokens of essays.* \d+"):
        load("needle@99999", 5, 0, tokenizer, data=data)
    deep = load("needle@512", 5, 0, tokenizer, data=data, needle_depth=(0.25, 0.75))
    assert [s.context for s in deep] == [samples[1].context, samples[3].context]
    with pytest.raises(UserError, match=r"synthetic .*needle"):
        load("synthetic/qa", 5, 0, tokenizer, needle_depth=(0.5,))


@pytest.mark.parametrize(("task", "row", "words"), REFUSED["columns"])
def test_columns_that_are_missing_are_named(hub, tokenizer, task, row, words):
    name, _, config = task.partition("/")
    paths = {"math500": "test.jsonl", "ruler": "4096/test.jsonl"}
    path = paths.get(name, f"{config}/test.jsonl")
    data = hub(name, {path: [row]}, "" if name in paths else card_of(config))
    with pytest.raises(UserError, match=words):
        load(task, 9, 0, tokenizer, data=data)
    for folder in (data, "no_such_folder"):  # which is not looked up on the hub
        with pytest.raises(UserError, match=r" loogle .* from /.*--data.*simonjegou/loogle"):
            load("loogle/shortdep_qa", 9, 0, tokenizer, data=folder)


# ---- metrics -----------------------------------------------------------------------------------


def test_every_task_has_a_metric():
    named = {metric for found in SETS.values() for metric in found.metrics.values()}
    assert named <= {*METRICS, UNKNOWN}
    assert all(source.tasks for source in SOURCES.values())


@pytest.mark.parametrize(("metric", "prediction", "answers", "expected"), SCORES)
def test_metrics(metric, prediction, answers, expected):
    assert METRICS[metric](prediction, answers) == pytest.approx(expected)


def test_digits_without_end_are_scored():
    """A model that loops writes more of them than `int` reads."""
    ones = "1" * 5000
    assert METRICS["first_numbers"](f"07 {ones}", ["7", ones]) == 1
    assert METRICS["boxed"](rf"\boxed{{0{ones}}}", [ones]) == 1


@pytest.mark.parametrize(("metric", "library"), [("rouge_l", "rouge_score"), ("f1_zh", "jieba")])
def test_metrics_need_their_library(monkeypatch, metric, library):
    known = [name for name in sys.modules if name.partition(".")[0] == library]
    for name in {library, *known}:
        monkeypatch.setitem(sys.modules, name, None)
    metrics._rouge_scorer.cache_clear()
    metrics._jieba.cache_clear()
    with pytest.raises(UserError, match=rf"{library} .*hook-or-patch\[evaluate\]"):
        METRICS[metric]("a b", ["a b"])


def test_a_choice_within_the_right_one_is_not_another():
    assert metrics.choice("animal name", ["animal name"], ["animal name", "animal", "x"]) == 1
    assert metrics.choice("animal", ["animal name"], ["animal name", "animal"]) == 0
