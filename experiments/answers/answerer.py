"""Answers to questions about contexts that were compressed with a press."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments import UserError
from experiments.answers.compressed import Compressed, Row, compressed, without_change
from experiments.answers.kept import SavedContext, check_free, keep, opened
from press_core import Press
from press_core.presses.finch import Finch

logger = logging.getLogger(__name__)

DELIMITER = 2**31 - 1
"""Token id between context and question for Finch, which takes it out again: in no vocabulary."""

GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
"""What `generate` is told unless somebody asks for something else, whatever the model's own
`generation_config` says."""

_BEFORE_QUESTIONS = (
    "what is saved is compressed before a question is known; leave compress_questions and "
    "FinchPress out"
)

_MARK = "\x00question\x00"  # where a chat template is cut


class Answered(NamedTuple):
    """Answers, and what it took.

    Attributes:
        answers: a list for each context, with a text or, for `num_return_sequences`, a list of
            texts for each question.
        evicted: share of the tokens that was evicted, on average over contexts, heads and layers:
            when the context was compressed or, by presses that act while decoding, in the end.
    """

    answers: list[list[Any]]
    evicted: float


class ContextAnswerer:
    """Compresses contexts with a press and answers questions about them.

    Args:
        model: a decoder of `transformers`, dispatched over devices or not.
        tokenizer: of that model, with or without chat template and padding token.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer

    def __call__(
        self, contexts: Contexts, questions: Questions = None, **options: Any
    ) -> list[Any]:
        """The answers of `answered`, those about the one context where there is but one."""
        answers = self.answered(contexts, questions, **options).answers
        alone = contexts.is_one if isinstance(contexts, SavedContext) else isinstance(contexts, str)
        return answers[0] if alone else answers

    def answered(
        self,
        contexts: Contexts,
        questions: Questions = None,
        *,
        press: Press | None = None,
        budget: int | None = None,
        answer_prefix: str | Sequence[str] = "",
        compress_questions: bool = False,
        cache: Any = None,
        max_context_length: int | None = None,
        max_positions: int | None = None,
        chat_template: bool | None = None,
        enable_thinking: bool = False,
        template_options: Mapping[str, Any] | None = None,
        save_to: str | Path | None = None,
        max_new_tokens: int = 50,
        **generation: Any,
    ) -> Answered:
        """Answer questions about each context.

        The text is context, question, `answer_prefix`, one right after the other: separators are up
        to the caller. A chat template goes around context and question. All contexts run as one
        batch; what a row keeps and answers does not depend on the others.

        Args:
            contexts: one or several; blank ones are taken as they are. Or what `save_to` has kept,
                a `SavedContext`: what was said of contexts then is not to be said again.
            questions: about the context, or about each of several: the same for all, or a list for
                each. All of them are asked of the same compressed cache, none sees another. None,
                or an empty one: the model goes on after the context.
            answer_prefix: how every answer begins, or those about each context.
            press: of either package; None: nothing is compressed. Of a `SavedContext`: the one that
                it was compressed with, if that acts while decoding, and else none.
            budget: how many tokens of each context the press is to keep, in place of what it says
                itself (`press.with_budget`). Contexts of no more are left whole.
            compress_questions: compress context and question together, for each question anew. If
                no text follows the question, its last token is run again on the compressed cache,
                for its first run did not feel the eviction. A `FinchPress` always does this.
            cache: an empty cache to use, say a QuantizedCache; holds the compressed context
                afterwards, without the questions.
            max_context_length: longer contexts lose tokens in their middle, with a warning on the
                logger of this module; None: none do.
            max_positions: tokens that context and question may take; None: as many as the model
                was made for (`max_position_embeddings`).
            chat_template: whether to apply it; None: where there is one.
            enable_thinking: for chat templates that know the word.
            template_options: more for `tokenizer.apply_chat_template`.
            save_to: a new file for the compressed contexts, to be asked later as a `SavedContext`.
            generation: for `model.generate`, which is greedy unless asked to be otherwise, here or
                by a `generation_config`.

        Raises:
            UserError: saying what is wrong with the texts, the cache or the tokenizer.
            PressError: if the press does not fit model or cache, or cannot be told a budget.
        """
        press = _with_budget(press, budget)
        options = {"max_new_tokens": max_new_tokens, **_greedy_unless(generation), **generation}
        if isinstance(contexts, SavedContext):
            given = {
                "compress_questions": compress_questions,
                "cache": cache,
                "max_context_length": max_context_length,
                "chat_template": chat_template,
                "enable_thinking": enable_thinking,
                "template_options": template_options,
                "save_to": save_to,
            }
            _refuse_for_saved([name for name, value in given.items() if value not in (None, False)])
            return self._ask_saved(
                contexts, questions, press, answer_prefix, max_positions, options
            )
        texts = [contexts] if isinstance(contexts, str) else list(contexts)
        asked = questions_of(texts, questions)
        words = {"enable_thinking": enable_thinking, **(template_options or {})}
        template = self._template(chat_template, words)
        heads = [self._context_ids(text, template, max_context_length) for text in texts]
        prompts = self._prompts(heads, asked, answer_prefix, max_positions)
        press, delimiter = _with_delimiter(press)
        if compress_questions or delimiter is not None:
            if save_to is not None:
                raise UserError(_BEFORE_QUESTIONS)
            return self._together(prompts, press, delimiter, cache, options)
        with self._read(heads, press, cache, save_to, isinstance(contexts, str)) as state:
            return Answered(self._ask_all(state, prompts, options), state.evicted)

    def save(
        self,
        contexts: str | Sequence[str],
        path: str | Path,
        *,
        press: Press | None = None,
        budget: int | None = None,
        max_context_length: int | None = None,
        chat_template: bool | None = None,
        enable_thinking: bool = False,
        template_options: Mapping[str, Any] | None = None,
    ) -> SavedContext:
        """Compress contexts and keep them in a new file, to be asked later.

        Args:
            contexts: one, or several that are asked as one batch.
            path: of the file; no file is ever written over.
            press, budget, max_context_length, chat_template, enable_thinking, template_options: as
                for `answered`.

        Raises:
            UserError: saying what is wrong with the texts, the press or the tokenizer.
            PressError: if the press does not fit the model, or its cache cannot be kept.
        """
        if isinstance(press, Finch):
            raise UserError(_BEFORE_QUESTIONS)
        press = _with_budget(press, budget)
        texts = [contexts] if isinstance(contexts, str) else list(contexts)
        questions_of(texts, None)
        words = {"enable_thinking": enable_thinking, **(template_options or {})}
        template = self._template(chat_template, words)
        heads = [self._context_ids(text, template, max_context_length) for text in texts]
        with self._read(heads, press, None, path, isinstance(contexts, str)):
            return SavedContext(path)

    @contextmanager
    def _read(
        self,
        heads: Sequence[tuple[list[int], str]],
        press: Press | None,
        cache: Any,
        save_to: str | Path | None,
        is_one: bool,
    ) -> Iterator[Compressed]:
        """Compress contexts as one batch, and keep them if there is a file to keep them in."""
        if save_to is not None:
            check_free(save_to)
        rows = [Row(ids) for ids, _ in heads]
        with compressed(self.model, rows, press, self._pad_id(rows), cache) as state:
            if save_to is not None:
                keep(state, save_to, press, [tail for _, tail in heads], is_one)
            yield state

    def _ask_saved(
        self,
        saved: SavedContext,
        questions: Questions,
        press: Press | None,
        answer_prefix: str | Sequence[str],
        max_positions: int | None,
        options: dict[str, Any],
    ) -> Answered:
        """Answer questions about contexts that were compressed before."""
        with opened(saved, self.model, press) as (state, tails):
            heads = [
                (ids[mask.bool()].tolist(), tail)
                for ids, mask, tail in zip(state.ids, state.mask, tails, strict=True)
            ]
            asked = questions_of([""] * len(heads), questions)
            prompts = self._prompts(heads, asked, answer_prefix, max_positions)
            return Answered(self._ask_all(state, prompts, options), state.evicted)

    def _prompts(
        self,
        heads: Sequence[tuple[list[int], str]],
        asked: list[list[str]],
        answer_prefix: str | Sequence[str],
        max_positions: int | None,
    ) -> list[list[Prompt]]:
        """The prompts of each question about each context.

        Args:
            heads: the tokens of each context, and the text that comes after a question.
        """
        prefixes: Sequence[str] = (
            [answer_prefix] * len(heads) if isinstance(answer_prefix, str) else answer_prefix
        )
        prompts = [
            [Prompt(head, self._encode(q), self._encode(tail + prefix)) for q in per_context]
            for (head, tail), per_context, prefix in zip(heads, asked, prefixes, strict=True)
        ]
        for prompt in (prompt for row in prompts for prompt in row):
            self._check_length(prompt, max_positions)
        return prompts

    # ---- text to tokens --------------------------------------------------------------------------

    def _template(
        self, wanted: bool | None, options: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Options of the chat template, or None if there is none to apply."""
        has_one = bool(getattr(self.tokenizer, "chat_template", None))
        if wanted and not has_one:
            raise UserError(
                "chat_template=True, and the tokenizer has none; set tokenizer.chat_template, or "
                "leave it to None and put what is to stand around the question into the texts"
            )
        return options if has_one and wanted is not False else None

    def _context_ids(
        self, context: str, template: Mapping[str, Any] | None, at_most: int | None
    ) -> tuple[list[int], str]:
        """Tokens of a context, and the text that a template puts after the question."""
        tail = ""
        if template is None:
            ids = self._encode(context, add_special_tokens=True)
            if ids and ids[-1] == self.tokenizer.eos_token_id:  # the text goes on
                ids.pop()
        else:
            message = [{"role": "user", "content": context + _MARK}]
            text = self.tokenizer.apply_chat_template(
                message, add_generation_prompt=True, tokenize=False, **template
            )
            head, tail = str(text).rsplit(_MARK, 1)
            ids = self._encode(head)
        if at_most is not None and len(ids) > at_most:
            if at_most < 2:
                raise UserError(f"max_context_length is {at_most}; it must be 2 or more")
            logger.warning(
                "a context of %d tokens is cut to %d: it loses its middle", len(ids), at_most
            )
            ids = ids[: at_most // 2] + ids[at_most // 2 - at_most :]
        return ids or [self._start_id()], tail

    def _start_id(self) -> int:
        """What a context of no tokens is replaced by, for a model reads at least one."""
        known = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        for index in known:
            if index is not None:
                return int(index)
        raise UserError(
            "a context has no tokens, and the tokenizer no token for the start of a text; give a "
            "context of at least one word"
        )

    def _encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def _check_length(self, prompt: Prompt, limit: int | None) -> None:
        config = self.model.config.get_text_config(decoder=True)
        limit = limit or getattr(config, "max_position_embeddings", None)
        n_asked = len(prompt.question) + len(prompt.tail)
        if limit is None or len(prompt.context) + n_asked <= limit:
            return
        if n_asked >= limit:
            raise UserError(
                f"the question takes {n_asked} tokens, more than the {limit} positions of the "
                "model leave room for with any context; ask a shorter one"
            )
        raise UserError(
            f"context and question take {len(prompt.context)} and {n_asked} tokens, more than the "
            f"{limit} positions of the model; cut the context with max_context_length="
            f"{limit - n_asked} or less, or give max_positions if the model can go further"
        )

    def _pad_id(self, rows: Sequence[Row]) -> int:
        """The token for padding, which nobody sees: any will do."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        found = [index for index in known if index is not None]
        if not found and len({len(row.ids) for row in rows}) > 1:
            raise UserError(
                "the contexts differ in length, and the tokenizer has neither a padding token nor "
                "an end-of-sequence token to fill the shorter ones with; set tokenizer.pad_token, "
                "or run them one by one"
            )
        return int(found[0]) if found else 0

    # ---- tokens to answers -----------------------------------------------------------------------

    def _ask_all(
        self, state: Compressed, prompts: list[list[Prompt]], options: dict[str, Any]
    ) -> list[list[Any]]:
        """Ask the first question of each context, then the second, and so on."""
        answers: list[list[Any]] = [[None] * len(row) for row in prompts]
        for index in range(max(len(row) for row in prompts)):
            asked = {i: row[index] for i, row in enumerate(prompts) if index < len(row)}
            new = {i: prompt.question + prompt.tail for i, prompt in asked.items()}
            for i, answer in self._ask(state, new, options).items():
                answers[i][index] = answer
        return answers

    def _together(
        self,
        prompts: list[list[Prompt]],
        press: Press | None,
        delimiter: int | None,
        cache: Any,
        options: dict[str, Any],
    ) -> Answered:
        """Compress every context with each of its questions, and answer it."""
        flat = [prompt for row in prompts for prompt in row]
        rows = [Row(p.context + p.question, len(p.context)) for p in flat]
        answers: list[Any] = []
        evicted = 0.0
        step = len(prompts)  # as large a batch as the contexts alone would be
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            # A cache holds one batch: if there are more, each has a copy of the empty one.
            own = cache if len(rows) <= step else without_change(cache)
            with compressed(self.model, part, press, self._pad_id(part), own, delimiter) as state:
                tails = {i: flat[start + i].tail for i in range(len(part))}
                found = self._ask(state, tails, options)
                answers += [found[i] for i in range(len(part))]
            evicted += state.evicted * len(part)
        remaining = iter(answers)
        return Answered([[next(remaining) for _ in row] for row in prompts], evicted / len(rows))

    def _ask(
        self, state: Compressed, new: Mapping[int, list[int]], options: dict[str, Any]
    ) -> dict[int, Any]:
        """Answers to new tokens of some rows, those of one length in one batch.

        Questions are never padded: a mask with holes is more than presses that act while decoding
        have to understand.
        """

        def length(i: int) -> int:
            return len(new[i])

        found: dict[int, Any] = {}
        for _, group in groupby(sorted(new, key=length), key=length):
            rows = list(group)
            tokens = state.generate(rows, [new[i] for i in rows], options)
            found |= dict(zip(rows, map(self._decode, tokens), strict=True))
        return found

    def _decode(self, sequences: list[list[int]]) -> Any:
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in sequences]
        return texts if len(texts) > 1 else texts[0]


class Prompt(NamedTuple):
    """Token ids of context, question and what follows it."""

    context: list[int]
    question: list[int]
    tail: list[int]


Contexts = str | Sequence[str] | SavedContext
Questions = Sequence[str] | Sequence[Sequence[str]] | None


def questions_of(contexts: Sequence[str], questions: Any) -> list[list[str]]:
    """The questions about each context, all checked; an empty one where there are none."""
    if not contexts:
        raise UserError("there is no context; give at least one")
    for place, context in enumerate(contexts):
        if not isinstance(context, str):
            raise UserError(f"context {place} is {context!r:.60}; a context is a text")
    if questions is None:
        questions = [""]
    if isinstance(questions, str) or not isinstance(questions, Sequence) or not questions:
        raise UserError(f"questions is {questions!r:.60}; give a list of at least one question")
    nested = isinstance(questions[0], (list, tuple))
    per_context = [list(q) for q in questions] if nested else [list(questions)] * len(contexts)
    if len(per_context) != len(contexts):
        raise UserError(
            f"there are questions for {len(per_context)} contexts, and {len(contexts)} contexts; "
            "give a list of questions for each, or one list of texts for all"
        )
    wrong = [q for row in per_context for q in row or [None] if not isinstance(q, str)]
    if wrong:
        raise UserError(f"a question is {wrong[0]!r:.60}; each context needs a list of texts")
    return per_context


def _greedy_unless(generation: Mapping[str, Any]) -> dict[str, Any]:
    """`GREEDY`, unless arguments of `generate` ask for something else."""
    asks = generation.get("generation_config") is not None or generation.get("do_sample")
    return {} if asks else dict(GREEDY)


def _refuse_for_saved(given: list[str]) -> None:
    if given:
        raise UserError(
            f"{', '.join(given)} is of no use for a SavedContext, which is compressed already; "
            "leave it out"
        )


def _with_budget(press: Press | None, budget: int | None) -> Press | None:
    if budget is None:
        return press
    if press is None:
        raise UserError(f"budget is {budget}, and there is no press to keep to it; give a press")
    return press.with_budget(budget)


def _with_delimiter(press: Press | None) -> tuple[Press | None, int | None]:
    """The press as it is run, and the delimiter that it expects before a question, if any."""
    if not isinstance(press, Finch):
        return press, None
    if press.delimiter_token_id is None:
        press = replace(press, delimiter_token_id=DELIMITER)
    return press, press.delimiter_token_id
