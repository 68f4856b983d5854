"""The facts task: key-value pairs of words hidden in filler, asked for at the end.

A context is a run of filler words in which ``facts`` pairs such as ``alice tea`` stand at random
places; a question is ``? alice`` and its answer, one token, ``tea``. Words are readable and each
is one token, so a sample can be used as tensors (`draw`) or as text (`FactBatch.text`).

It is asked of pruned caches in two ways.

*Question unseen*: the press compresses the context, then every question about it is asked from a
copy of the same pruned cache. A question is two tokens, read in one forward.

*Question seen*: the press compresses the context together with one question. The logits of that
prefill have not felt the eviction, which happens as each layer finishes; so the last token of the
question is run once more, at its own position, on the pruned cache, and the answer read from there.
(Asking the whole question again would not do: a model trained to be asked once finds the first
asking, not the fact.)
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor
from transformers import AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

from experiments import UserError, refusing
from press_core.presses.finch import Finch
from press_core.scope import InstalledPress

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


# ---- asked of pruned caches ----------------------------------------------------------------------

UNSEEN, SEEN = "unseen", "seen"
"""What a press knows of the question when it evicts."""

_BATCH = 8
"""Contexts per forward; on a CPU more only fall out of its caches."""


@dataclass(frozen=True)
class Task:
    """How the facts task is drawn.

    Raises:
        UserError: if the contexts cannot hold the facts.

    Attributes:
        context: words per context, `<bos>` not counted.
        facts: facts per context.
        samples: contexts compressed without a question; all of their facts are asked for.
        seen_samples: contexts compressed together with a question, the first of each.
        seed: of the contexts.
    """

    context: int = 512
    facts: int = 8
    samples: int = 16
    seen_samples: int = 24
    seed: int = 512

    def __post_init__(self) -> None:
        with refusing("--context, --facts", ValueError):
            draw(1, self.context, self.facts, torch.Generator())

    def batches(self, question: str) -> list[FactBatch]:
        """The contexts for one kind of question, `_BATCH` or fewer at a time."""
        generator = torch.Generator().manual_seed(self.seed)
        samples = self.samples if question == UNSEEN else self.seen_samples
        sizes = [min(_BATCH, samples - first) for first in range(0, samples, _BATCH)]
        return [draw(size, self.context, self.facts, generator) for size in sizes]


@torch.inference_mode()
def answer_unseen(model: PreTrainedModel, press: InstalledPress | None, batch: FactBatch) -> Tensor:
    """Answers to all questions about contexts that were compressed before any was known.

    Each question has its own copy of the pruned cache, so that none sees another or its answer.

    Args:
        press: opened on `model` meanwhile; None: nothing is compressed.

    Returns:
        `(B, facts)` int64, the likeliest of all tokens after each question.
    """
    rows, n_facts = batch.answer_ids.shape
    with nullcontext() if press is None else press(model):
        cache = _prefill(model, batch.context_ids)
        cache.batch_repeat_interleave(n_facts)
        questions = batch.question_ids.flatten(0, 1).to(model.device)
        logits = model(input_ids=questions, past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1].argmax(dim=-1).view(rows, n_facts).cpu()


@torch.inference_mode()
def answer_seen(model: PreTrainedModel, press: InstalledPress | None, batch: FactBatch) -> Tensor:
    """Answers to the first question about each context, compressed together with it.

    Args:
        press: opened on `model` meanwhile; None: nothing is compressed.

    Returns:
        `(B, 1)` int64, the likeliest of all tokens after the question.
    """
    context, question = batch.context_ids, batch.question_ids[:, 0]
    last = question[:, -1:].to(model.device)
    position = torch.full_like(last, context.shape[1] + question.shape[1] - 1)
    parts = [context, question]
    if isinstance(press, Finch):
        assert press.delimiter_token_id is not None
        parts.insert(1, torch.full_like(context[:, :1], press.delimiter_token_id))
    with nullcontext() if press is None else press(model):
        cache = _prefill(model, torch.cat(parts, dim=1))
        logits = model(input_ids=last, position_ids=position, past_key_values=cache).logits
    return logits[:, -1].argmax(dim=-1, keepdim=True).cpu()


def _prefill(model: PreTrainedModel, input_ids: Tensor) -> Cache:
    # Without the language-modelling head: nobody reads logits over the context.
    return model.base_model(input_ids=input_ids.to(model.device), use_cache=True).past_key_values


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a model that does not speak the language of the facts task.

    Raises:
        UserError: if its tokens are not those of `experiments.testbed.facts`.
    """
    if tokenizer.get_vocab() != {word: index for index, word in enumerate(VOCABULARY)}:
        raise UserError(
            f"{name!r} has another vocabulary than the facts task; give facts-llama, a model "
            "trained by `python -m experiments train facts`, or another task, such as synthetic"
        )
