"""The facts task: key-value pairs of words among filler words, with questions at the end.

A context consists of filler words, with ``facts`` pairs such as ``alice tea`` at random positions.
A question is ``? alice``, and its answer is one token, ``tea``. Words are readable and each is one
token, so a sample can be used as tensors (`draw`) or as text (`FactBatch.text`).

There are two protocols for pruned caches.

*Question unseen*: the press compresses the context, then every question about it is answered from a
copy of the same pruned cache. A question is two tokens, run in one forward.

*Question seen*: the press compresses the context together with one question. The logits of that
prefill are not affected by the eviction, because each layer is pruned after its attention. So the
last token of the question is run again, at its own position, on the pruned cache, and the answer is
read from its logits. (Repeating the whole question does not work: the model is trained on a single
question, and retrieves the first occurrence of the question instead of the fact.)
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

from experiments import UserError, data_of, refusing
from press_core.forward import cache_of
from press_core.presses.finch import Finch
from press_core.scope import InstalledPress

_WORDS = data_of(__file__)
KEYS: tuple[str, ...] = tuple(_WORDS["keys"].split())
"""The 128 words that a fact can be about: first names."""
VALUES: tuple[str, ...] = tuple(_WORDS["values"].split())
"""The 128 words that can be an answer: food, animals and things."""
FILLER: tuple[str, ...] = tuple(_WORDS["filler"].split())
"""The 368 words between the facts."""

PAD, BOS, UNKNOWN, QUESTION = "<pad>", "<bos>", "<unk>", "?"

VOCABULARY: tuple[str, ...] = (PAD, BOS, UNKNOWN, QUESTION, *KEYS, *VALUES, *FILLER)
"""Every token; a token's id is its index here."""

_FIRST_KEY = VOCABULARY.index(KEYS[0])
_FIRST_VALUE = VOCABULARY.index(VALUES[0])
_FIRST_FILLER = VOCABULARY.index(FILLER[0])


def build_tokenizer() -> PreTrainedTokenizerBase:
    """The word-level tokenizer of `VOCABULARY`, which ships with facts-llama.

    It prepends ``<bos>``, unless called with ``add_special_tokens=False``. A question mark is a
    separate token, also without a space before or after it. There is no end-of-sequence token:
    an answer is one token long, so generation ends with ``max_new_tokens=1``.
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
    """

    context_ids: Tensor
    question_ids: Tensor
    answer_ids: Tensor

    def text(self, index: int) -> FactText:
        """Sample ``index`` of the batch in words, for the tokenizer of `build_tokenizer`.

        The context has no ``<bos>``, as the tokenizer adds it. Questions continue the context:
        tokenize them with ``add_special_tokens=False``.
        """
        return FactText(
            context=_words(self.context_ids[index, 1:]),
            questions=tuple(_words(question) for question in self.question_ids[index]),
            answers=tuple(_words(answer) for answer in self.answer_ids[index, :, None]),
        )


def draw(batch_size: int, context: int, facts: int, generator: torch.Generator) -> FactBatch:
    """Draw ``batch_size`` contexts of ``context`` words with ``facts`` facts in each.

    Facts start at even word indices and never share a key within one sample. Their order in the
    batch, which is that of the questions, is independent of their positions.

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
            f"facts is {facts}; give 1 or more: a context of {context} words holds {most} at most, "
            "each of two words and about a key of its own"
        )
    keys = _distinct(batch_size, len(KEYS), facts, generator) + _FIRST_KEY
    values = torch.randint(len(VALUES), (batch_size, facts), generator=generator) + _FIRST_VALUE
    filler = torch.randint(len(FILLER), (batch_size, context), generator=generator) + _FIRST_FILLER
    positions = 1 + 2 * _distinct(batch_size, context // 2, facts, generator)
    context_ids = torch.cat([torch.full((batch_size, 1), VOCABULARY.index(BOS)), filler], dim=1)
    context_ids.scatter_(1, positions, keys).scatter_(1, positions + 1, values)
    question_ids = torch.stack([torch.full_like(keys, VOCABULARY.index(QUESTION)), keys], dim=-1)
    return FactBatch(context_ids, question_ids, values)


def _distinct(rows: int, below: int, count: int, generator: torch.Generator) -> Tensor:
    """``(rows, count)`` int64, distinct random numbers below ``below`` in each row."""
    return torch.rand(rows, below, generator=generator).argsort(dim=1)[:, :count]


def _words(ids: Tensor) -> str:
    return " ".join(VOCABULARY[index] for index in ids.tolist())


# ---- answers from pruned caches ------------------------------------------------------------------

UNSEEN, SEEN = "unseen", "seen"
"""Whether a press has seen the question when it evicts."""

_BATCH = 8
"""Contexts per forward; larger batches exceed the processor's caches and are slower."""


@dataclass(frozen=True)
class Task:
    """The sizes and the seed of the facts task.

    Raises:
        UserError: if the contexts are too short for the facts.

    Attributes:
        context: words per context, without `<bos>`.
        facts: facts per context.
        samples: number of contexts; each has a question per fact.
        seed: seed of the contexts.
    """

    context: int = 512
    facts: int = 8
    samples: int = 16
    seed: int = 512

    def __post_init__(self) -> None:
        with refusing("--context, --facts", ValueError):
            draw(1, self.context, self.facts, torch.Generator())

    def batches(self) -> list[FactBatch]:
        """The contexts, in batches of at most `_BATCH`."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [min(_BATCH, self.samples - first) for first in range(0, self.samples, _BATCH)]
        return [draw(size, self.context, self.facts, generator) for size in sizes]


@torch.inference_mode()
def answer_unseen(model: PreTrainedModel, press: InstalledPress | None, batch: FactBatch) -> Tensor:
    """Answers to all questions about contexts that were compressed without a question.

    Each question has its own copy of the pruned cache, so it does not see other questions.

    Args:
        press: opened on `model` for prefill and questions; None for the full cache.

    Returns:
        `(B, facts)` int64, the likeliest token after each question.
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
    """Answers to the first question about each context, which is compressed with the context.

    Args:
        press: opened on `model` for prefill and question; None for the full cache.

    Returns:
        `(B, 1)` int64, the likeliest token after the question.
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
    # Without the language-modelling head, as the logits of the context are not needed.
    return cache_of(model.base_model(input_ids=input_ids.to(model.device), use_cache=True))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise if the tokenizer's vocabulary is not that of the facts task.

    Raises:
        UserError: if its tokens are not exactly those of `VOCABULARY`.
    """
    if tokenizer.get_vocab() != {word: index for index, word in enumerate(VOCABULARY)}:
        raise UserError(
            f"{name!r} has another vocabulary than the facts task; give facts-llama, a model "
            "trained by `python -m experiments train facts`, or another task, such as synthetic"
        )
