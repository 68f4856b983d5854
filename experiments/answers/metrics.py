"""How predictions are scored: from 0 (wrong) to 1 (right), by name.

Each metric takes a prediction and the reference answers, and follows the definition of its
benchmark; `choice` also takes all possible answers of the task.
"""

import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache, partial
from itertools import accumulate, takewhile
from types import SimpleNamespace
from typing import Any

from experiments import library
from experiments.answers.sample import Sample

Metric = Callable[[str, Sequence[str]], float]
Words = Callable[[str], Sequence[str]]


# ---- matches, choices and numbers ----------------------------------------------------------------


def match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the references that the prediction contains (RULER), ignoring case."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def match_any(prediction: str, answers: Sequence[str]) -> float:
    """Whether the prediction contains one of the references (RULER's question answering)."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def choice(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    """1 over the number of named choices if the right one is among them, else 0 (LongBench).

    A choice that is a substring of the right one does not count as named.
    """
    right = answers[0]
    named = [c for c in choices or answers if c in prediction and (c == right or c not in right)]
    return 1 / len(named) if right in named else 0.0


def numbers(prediction: str, answers: Sequence[str]) -> float:
    """Share of the numbers in the prediction that are in a reference (LongBench)."""
    wanted = set(re.findall(r"\d+", " ".join(answers)))
    found = re.findall(r"\d+", prediction)
    return sum(number in wanted for number in found) / len(found) if found else 0.0


def first(pattern: str) -> Metric:
    """Whether the first match of a pattern, or its group, is the reference."""

    def metric(prediction: str, answers: Sequence[str]) -> float:
        found = re.search(pattern, prediction)
        return float(found is not None and found[found.re.groups] in (a.strip() for a in answers))

    return metric


def last_word(prediction: str, answers: Sequence[str]) -> float:
    """Whether the last word is the reference (InfiniteBench's code_run)."""
    words = re.sub("[\n.`'\":]", " ", prediction).split()
    return float(bool(words) and words[-1] in (answer.strip() for answer in answers))


def first_number(prediction: str, answers: Sequence[str]) -> float:
    """Whether the first number, without its sign, is the reference (InfiniteBench's math_find)."""
    found = re.search(r"\d+(?:\.\d+)?", prediction)
    return float(found is not None and float(found[0]) == float(answers[0]))


def first_numbers(prediction: str, answers: Sequence[str]) -> float:
    """Share of the reference numbers before the first wrong one (InfiniteBench's math_calc)."""
    found = [_integer(digits) for digits in re.findall(r"[0-9]+", prediction)]
    pairs = zip(found, map(str.strip, answers), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))) / len(answers)


def code(prediction: str, answers: Sequence[str]) -> float:
    """Similarity of the first line of code to the reference (LongBench)."""
    lines = prediction.lstrip("\n").split("\n")
    first = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return max(SequenceMatcher(None, first, answer).ratio() for answer in answers)


def boxed(prediction: str, answers: Sequence[str]) -> float:
    r"""Whether the last `\boxed{...}` equals a reference up to LaTeX notation (AIME, MATH).

    Stricter than a computer algebra system, which would treat `1/2` and `0.5` as equal.
    """
    found = _last_boxed(prediction)
    return float(found is not None and _plain(found) in (_plain(answer) for answer in answers))


def _last_boxed(text: str) -> str | None:
    _, found, rest = text.rpartition(r"\boxed{")
    depths = accumulate(({"{": 1, "}": -1}.get(letter, 0) for letter in rest), initial=1)
    ends = [end for end, depth in enumerate(depths) if depth == 0]
    return rest[: ends[0] - 1] if found and ends else None  # None also if it is never closed


def _plain(latex: str) -> str:
    """Normalized LaTeX: no spaces, delimiters and sizes, integers without leading zeros."""
    for long, short in (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("^\\circ", "")):
        latex = latex.replace(long, short)
    plain = re.sub(r"\\left|\\right|\\text\s*|\\[!,;: ]|\s|\$|\.$", "", latex)
    return _integer(plain) if plain.isdecimal() else plain


def _integer(digits: str) -> str:
    """Digits without leading zeros; `int` refuses thousands of them, which a loop writes."""
    return digits.lstrip("0") or "0"


# ---- overlap of words ----------------------------------------------------------------------------


def english_words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles, as in SQuAD."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def chinese_words(text: str) -> list[str]:
    """Words as jieba segments them, without punctuation (LongBench)."""
    return [word for word in map(_bare, _jieba().cut(text)) if word]


def _bare(text: str) -> str:
    """The letters and digits of a text in lower case, without punctuation and spaces."""
    return "".join(c for c in text.lower() if c.isalnum())


def f1(prediction: str, answers: Sequence[str], *, words: Words = english_words) -> float:
    """Harmonic mean of precision and recall of words (SQuAD, LongBench), of the best reference."""
    found = words(prediction)
    return max(_overlap(found, words(answer)) for answer in answers)


def _overlap(found: Sequence[str], wanted: Sequence[str]) -> float:
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def rouge(prediction: str, answers: Sequence[str], *, chinese: bool = False) -> float:
    """F-measure of ROUGE-L (longest common subsequence of words), of the best reference.

    Args:
        chinese: split into words by jieba, not at spaces.
    """
    scorer = _rouge_scorer(chinese)
    return float(max(scorer.score(answer, prediction)["rougeL"].fmeasure for answer in answers))


@lru_cache
def _rouge_scorer(chinese: bool) -> Any:
    cut = _jieba().cut if chinese else lambda text: text.lower().split()
    tokenizer = SimpleNamespace(tokenize=lambda text: list(cut(text)))
    return library("rouge_score.rouge_scorer").RougeScorer(["rougeL"], tokenizer=tokenizer)


@lru_cache
def _jieba() -> Any:
    jieba = library("jieba")
    jieba.setLogLevel(logging.WARNING)
    return jieba


# ---- all of them ---------------------------------------------------------------------------------

UNKNOWN = "unknown"
"""The metric of tasks whose references are not published: predictions are stored without scores."""

_NAMED = match_all, match_any, f1, choice, numbers, first_number, first_numbers, last_word

METRICS: dict[str, Metric] = {
    **{metric.__name__: metric for metric in (*_NAMED, code, boxed)},
    "first_digits": first(r"\d+"),  # InfiniteBench
    # InfiniteBench: the one that an answer starts with, or else the last one that stands alone
    "letter": first(r"(?:^\s*(?=[A-D][.:])|.*\b)([A-D])\b"),
    "named_letter": first(r"The correct answer is[ *(]*([A-D])\b"),  # LongBench-v2
    "f1_zh": partial(f1, words=chinese_words),
    "f1_characters": partial(f1, words=_bare),
    "rouge_l": rouge,
    "rouge_l_zh": partial(rouge, chinese=True),
}
"""Every metric by its name."""


def score(sample: Sample, prediction: str) -> float | None:
    """Score of a prediction from 0 to 1 by its sample's metric; None if that is `UNKNOWN`."""
    if sample.metric == UNKNOWN:
        return None
    text = prediction.lstrip("\n").split("\n")[0] if sample.one_line else prediction
    if sample.metric == choice.__name__:
        return choice(text, sample.answers, sample.choices)
    return METRICS[sample.metric](text, sample.answers)
