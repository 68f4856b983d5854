"""How predictions are scored: from 0 (wrong) to 1 (right), by name.

Each metric takes a prediction, the reference answers and all choices that the task knows (often
none), as the benchmark that it comes from defines it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from experiments.answers.sample import Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BOXED = r"\boxed{"


def match_all(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    """Share of the references that the prediction contains (RULER), upper and lower case alike."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def match_any(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    """Whether the prediction contains one of the references (RULER's question answering)."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def f1(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    """Harmonic mean of precision and recall of words (SQuAD, LongBench), of the best reference."""
    return max(_overlap(_words(prediction), _words(answer)) for answer in answers)


def rouge_l(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    """F-measure of the longest common subsequence of words (ROUGE-L), of the best reference."""
    found = prediction.lower().split()
    scores = []
    for answer in answers:
        words = answer.lower().split()
        common = _longest_common(found, words)
        scores.append(2 * common / (len(found) + len(words)) if common else 0.0)
    return max(scores)


def choice(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    """Whether the right choice is named (LongBench); shared among all choices that are named.

    A choice that is part of the right one does not count as named.
    """
    right = answers[0]
    named = [c for c in choices or answers if c in prediction and (c == right or c not in right)]
    return 1 / len(named) if right in named else 0.0


def numbers(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the one asked for (LongBench)."""
    wanted = set(_NUMBER.findall(" ".join(answers)))
    found = _NUMBER.findall(prediction)
    return sum(number in wanted for number in found) / len(found) if found else 0.0


def first_number(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    """Whether the first number in the prediction is the one asked for (InfiniteBench)."""
    found = _NUMBER.search(prediction)
    return float(found is not None and found.group() in (a.strip() for a in answers))


def letter(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    """Whether the first letter from A to D that stands alone is the right one (InfiniteBench)."""
    found = re.search(r"\b[A-D]\b", prediction)
    return float(found is not None and found.group() in answers)


def code(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    """Similarity of the first line of code to the reference (LongBench)."""
    lines = prediction.lstrip("\n").split("\n")
    first = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return max(SequenceMatcher(None, first, answer).ratio() for answer in answers)


def boxed(prediction: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
    r"""Whether the last `\boxed{...}` is the reference, up to ways of writing it (AIME, MATH).

    Stricter than a computer algebra system, which would find `1/2` and `0.5` equal.
    """
    found = _last_boxed(prediction)
    return float(found is not None and _plain(found) in (_plain(answer) for answer in answers))


METRICS: dict[str, Callable[[str, Sequence[str], Sequence[str]], float]] = {
    metric.__name__: metric
    for metric in (
        *(match_all, match_any, f1, rouge_l, choice),
        *(numbers, first_number, letter, code, boxed),
    )
}
"""Every metric by its name."""


def score(sample: Sample, prediction: str) -> float:
    """How right a prediction is, from 0 to 1, by the metric of its sample."""
    if sample.one_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return METRICS[sample.metric](prediction, sample.answers, sample.choices)


def _words(text: str) -> list[str]:
    """Words without upper case, punctuation and articles, as SQuAD compares them."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def _overlap(found: list[str], wanted: list[str]) -> float:
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def _longest_common(one: list[str], other: list[str]) -> int:
    """Length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for i, candidate in enumerate(other, 1):
            diagonal, longer = lengths[i], diagonal + 1 if word == candidate else 0
            lengths[i] = max(lengths[i], lengths[i - 1], longer)
    return lengths[-1]


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOXED)
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None  # cut off before it was closed


def _plain(latex: str) -> str:
    """LaTeX without spaces, delimiters and sizes; whole numbers without leading zeros."""
    for long, short in (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("^\\circ", "")):
        latex = latex.replace(long, short)
    plain = re.sub(r"\\left|\\right|\\text\s*|\\[!,;: ]|\s|\$|\.$", "", latex)
    return str(int(plain)) if plain.isdecimal() else plain
