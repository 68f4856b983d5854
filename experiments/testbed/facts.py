"""The facts task: key-value pairs of words hidden in filler, asked for at the end.

A context is a run of filler words in which ``facts`` pairs such as ``alice tea`` stand at random
places; a question is ``? alice`` and its answer, one token, ``tea``. Words are readable and each
is one token, so a sample can be used as tensors (`draw`) or as text (`FactBatch.text`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

_WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
KEYS: tuple[str, ...] = tuple(_WORDS["keys"].split())
"""The 128 words that a fact can be about: first names."""
VALUES: tuple[str, ...] = tuple(_WORDS["values"].split())
"""The 128 words that can be an answer: food, animals and things."""
FILLER: tuple[str, ...] = tuple(_WORDS["filler"].split())
"""The 368 words between the facts."""

PAD, BOS, UNKNOWN, QUESTION = "<pad>", "<bos>", "<unk>", "?"

VOCABULARY: tuple[str, ...] = (PAD, BOS, UNKNOWN, QUESTION, *KEYS, *VALUES, *FILLER)
"""Every token; a token's id is its place here."""

_FIRST_KEY = VOCABULARY.index(KEYS[0])
_FIRST_VALUE = VOCABULARY.index(VALUES[0])
_FIRST_FILLER = VOCABULARY.index(FILLER[0])


def build_tokenizer() -> PreTrainedTokenizerBase:
    """The word-level tokenizer of `VOCABULARY`, which ships with facts-llama.

    It starts a text with ``<bos>``; with ``add_special_tokens=False`` it does not. A question mark
    is a token of its own, also when no space separates it from a word. There is no end-of-sequence
    token: an answer is one token long, so generation ends with ``max_new_tokens=1``.
    """
    return AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "models" / "facts-llama")


class FactText(NamedTuple):
    """One sample in words: ``answers[i]`` is the word that follows ``context + questions[i]``."""

    context: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


class FactBatch(NamedTuple):
    """A batch of contexts, each with the questions about its facts, as int64 tensors.

    Attributes:
        context_ids: ``(batch, 1 + context)``, ``<bos>`` and then the words of the context.
        question_ids: ``(batch, facts, 2)``, the question mark and the key of each fact.
        answer_ids: ``(batch, facts)``, the value of each fact.
        positions: ``(batch, facts)``, the place of each fact's key in ``context_ids``; its value
            stands one further on.
    """

    context_ids: Tensor
    question_ids: Tensor
    answer_ids: Tensor
    positions: Tensor

    def text(self, index: int) -> FactText:
        """Sample ``index`` of the batch in words, for `build_tokenizer` to read.

        The context does not spell out ``<bos>``, which the tokenizer adds. Questions continue the
        context: tokenize them with ``add_special_tokens=False``.
        """
        return FactText(
            context=_words(self.context_ids[index, 1:]),
            questions=tuple(_words(question) for question in self.question_ids[index]),
            answers=tuple(_words(answer) for answer in self.answer_ids[index, :, None]),
        )


def draw(batch_size: int, context: int, facts: int, generator: torch.Generator) -> FactBatch:
    """Draw ``batch_size`` contexts of ``context`` words with ``facts`` facts in each.

    Facts start at even places, counted from the first word, and never share a key within one
    sample. They are listed, and so asked for, in an order unrelated to their places.

    Args:
        batch_size: Number of samples, at least 1.
        context: Words in a context, facts included and ``<bos>`` not counted.
        facts: Facts in a context: at least 1, at most 128 and at most ``context // 2``.
        generator: The only source of randomness; a CPU generator.

    Raises:
        ValueError: A number is out of range.
    """
    most = min(len(KEYS), context // 2)
    if not 1 <= facts <= most:
        raise ValueError(
            f"facts is {facts}, which does not fit in a context of {context} words: it holds 1 to "
            f"{most}, each of two words and about a key of its own"
        )
    keys = _distinct(batch_size, len(KEYS), facts, generator) + _FIRST_KEY
    values = torch.randint(len(VALUES), (batch_size, facts), generator=generator) + _FIRST_VALUE
    filler = torch.randint(len(FILLER), (batch_size, context), generator=generator) + _FIRST_FILLER
    positions = 1 + 2 * _distinct(batch_size, context // 2, facts, generator)
    context_ids = torch.cat([torch.full((batch_size, 1), VOCABULARY.index(BOS)), filler], dim=1)
    context_ids.scatter_(1, positions, keys).scatter_(1, positions + 1, values)
    question_ids = torch.stack([torch.full_like(keys, VOCABULARY.index(QUESTION)), keys], dim=-1)
    return FactBatch(context_ids, question_ids, values, positions)


def _distinct(rows: int, below: int, count: int, generator: torch.Generator) -> Tensor:
    """``(rows, count)`` int64: in each row, distinct numbers below ``below``."""
    return torch.rand(rows, below, generator=generator).argsort(dim=1)[:, :count]


def _words(ids: Tensor) -> str:
    return " ".join(VOCABULARY[index] for index in ids.tolist())
