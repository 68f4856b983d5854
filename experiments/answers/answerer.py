"""Answers to questions about contexts that were compressed with a press."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments import UserError, refusing
from experiments.answers.compressed import Compressed, compressed, independent_copy
from experiments.answers.kept import SavedContext, check_savable, keep
from experiments.answers.prompts import (
    Head,
    Prompt,
    Questions,
    Reading,
    check_length,
    check_limit,
    check_press,
    generation_of,
    questions_of,
    texts_of,
)
from experiments.testbed.recipes import DELIMITER
from press_core.presses.finch import Finch
from press_core.scope import InstalledPress

logger = logging.getLogger(__name__)

_MARK = "\x00question\x00"  # marks the position of the question in a chat template

Contexts = str | Sequence[str] | SavedContext


class Answered(NamedTuple):
    """Answers, and the measured share of evicted tokens.

    Attributes:
        answers: a list for each context, with a text or, for `num_return_sequences`, a list of
            texts for each question.
        evicted: share of evicted tokens, mean over contexts, heads and layers, after the context
            was compressed. For presses that act while decoding, mean over answers, at their end.
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
        """The answers of `answered`; if `contexts` is a single context, its answers only."""
        answers = self.answered(contexts, questions, **options).answers
        alone = contexts.is_one if isinstance(contexts, SavedContext) else isinstance(contexts, str)
        return answers[0] if alone else answers

    def answered(
        self,
        contexts: Contexts,
        questions: Questions = None,
        *,
        press: InstalledPress | None = None,
        answer_prefix: str | Sequence[str] | None = None,
        compress_questions: bool = False,
        cache: Any = None,
        max_context_length: int | None = None,
        chat_template: bool | None = None,
        enable_thinking: bool = False,
        template_options: Mapping[str, Any] | None = None,
        **generation: Any,
    ) -> Answered:
        """Answer questions about each context.

        The text is the concatenation of context, question and `answer_prefix`, without added
        separators. A chat template encloses context and question. All contexts run as one batch;
        the kept tokens and answers of a row do not depend on the other rows.

        Args:
            contexts: one or several; blank ones are allowed. Or a `SavedContext` that `save` has
                returned; options for reading contexts must then be left out.
            questions: one list for all contexts, or a list for each. Every question is asked
                separately on the same compressed cache. None, or an empty question: the model
                continues the context.
            answer_prefix: beginning of all answers, or a list with one for each context; or None.
            press: a press of either package; None: nothing is compressed. For a `SavedContext`: the
                press that compressed it if that acts while decoding, else None.
            compress_questions: compress context and question together, for each question anew. If
                no text follows the question, its last token runs again on the compressed cache,
                because its first run attended to all tokens. A `FinchPress` always does this.
            cache: an empty cache to use, such as a QuantizedCache; afterwards it holds the
                compressed context, without the questions.
            max_context_length: longer contexts lose tokens in their middle, with a warning on the
                logger of this module; None: no limit.
            chat_template: whether to apply it; None: if the tokenizer has one.
            enable_thinking: for chat templates that support it.
            template_options: further arguments of `tokenizer.apply_chat_template`.
            generation: arguments of `model.generate`; greedy and `max_new_tokens=50` unless these,
                or a `generation_config`, say otherwise.

        Raises:
            UserError: if the texts, the cache or the tokenizer cannot be used; says why.
            PressError: if the press does not fit model or cache.
        """
        check_press(press)
        options = generation_of(generation)
        together = compress_questions or isinstance(press, Finch)
        reading = Reading(max_context_length, chat_template, enable_thinking, template_options)
        if isinstance(contexts, SavedContext):
            given = {**reading._asdict(), "cache": cache, "compress_questions": together}
            heads = contexts.heads_unless(given)
            opened = contexts.opened(self.model, press)
        else:
            heads = self._heads(contexts, reading)
            rows = [ids for ids, _ in heads]
            opened = compressed(self.model, rows, press, self._pad_id(rows), cache)
        prompts = self._prompts(heads, questions, "" if answer_prefix is None else answer_prefix)
        if together:
            return self._together(prompts, press, cache, options)
        with opened as state:
            new = [[prompt.question + prompt.tail for prompt in row] for row in prompts]
            return self._ask(state, new, options)

    def save(
        self,
        contexts: str | Sequence[str],
        path: str | Path,
        *,
        press: InstalledPress | None = None,
        **reading: Any,
    ) -> SavedContext:
        """Compress contexts and save them to a new file, for later questions.

        Args:
            contexts: one, or several that are answered as one batch.
            path: path of the file; an existing file is never overwritten.
            press: as for `answered`.
            reading: max_context_length, chat_template, enable_thinking, template_options, as for
                `answered`.

        Raises:
            UserError: if the texts, the press or the tokenizer cannot be used; says why.
            PressError: if the press does not fit the model, or its cache cannot be saved.
        """
        check_press(press)
        check_savable(path, press)
        heads = self._heads(contexts, Reading(**reading))
        rows, tails = [ids for ids, _ in heads], [tail for _, tail in heads]
        with compressed(self.model, rows, press, self._pad_id(rows)) as state:
            keep(state, path, press, tails, isinstance(contexts, str))
        return SavedContext(path)

    def _prompts(
        self, heads: Sequence[Head], questions: Questions, answer_prefix: str | Sequence[str]
    ) -> list[list[Prompt]]:
        """The prompts of each question about each context."""
        per_row = questions_of(len(heads), questions)
        given = [answer_prefix] * len(heads) if isinstance(answer_prefix, str) else answer_prefix
        prefixes = texts_of("answer_prefix", given)
        if len(prefixes) != len(heads):
            raise UserError(f"there are {len(prefixes)} answer prefixes for {len(heads)} contexts")
        prompts = [
            [Prompt(head, self._encode(q), self._encode(tail + prefix)) for q in per_context]
            for (head, tail), per_context, prefix in zip(heads, per_row, prefixes, strict=True)
        ]
        for prompt in (prompt for row in prompts for prompt in row):
            check_length(prompt, self._limit)
        return prompts

    # ---- text to tokens --------------------------------------------------------------------------

    def _heads(self, contexts: Any, reading: Reading) -> list[Head]:
        """Token ids of each context, and the chat template's text after the question."""
        check_limit("max_context_length", reading.max_context_length, 2)
        return [self._head(text, reading) for text in texts_of("contexts", contexts)]

    def _head(self, context: str, reading: Reading) -> Head:
        templated, tail, at_most = reading.chat_template, "", reading.max_context_length
        if templated or (templated is None and getattr(self.tokenizer, "chat_template", None)):
            words = {"enable_thinking": reading.enable_thinking, **(reading.template_options or {})}
            message = [{"role": "user", "content": context + _MARK}]
            with refusing("cannot apply the chat template", Exception):  # it may raise any
                text = self.tokenizer.apply_chat_template(
                    message, add_generation_prompt=True, tokenize=False, **words
                )
                if str(text).count(_MARK) != 1:
                    raise ValueError("it does not hold the text of the user once, unchanged")
            head, tail = str(text).split(_MARK)
            ids = self._encode(head)
        else:
            ids = self._encode(context, add_special_tokens=True)
            if ids and ids[-1] == self.tokenizer.eos_token_id:  # a question follows
                ids.pop()
        if at_most is not None and len(ids) > at_most:
            logger.warning("a context of %d tokens is cut to %d, in the middle", len(ids), at_most)
            ids = ids[: at_most // 2] + ids[at_most // 2 - at_most :]
        start = self._special("bos", "eos")  # a prefill needs at least one token
        if not ids and start is None:
            raise UserError(
                "a context has no tokens, and the tokenizer no token for the start of a text; give "
                "a context of at least one word"
            )
        return ids or [start], tail

    def _special(self, *names: str) -> Any:
        """The id of the first of these special tokens that the tokenizer has; None if none."""
        ids = (getattr(self.tokenizer, f"{name}_token_id") for name in names)
        return next((index for index in ids if index is not None), None)

    def _encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    @property
    def _limit(self) -> int | None:
        """`max_position_embeddings` of the model, if its configuration has it."""
        config = self.model.config.get_text_config(decoder=True)
        return getattr(config, "max_position_embeddings", None)

    def _pad_id(self, rows: list[list[int]]) -> int:
        """The padding token; its id does not matter, because it is masked."""
        found = self._special("pad", "eos")
        if found is None and len({len(row) for row in rows}) > 1:
            raise UserError(
                "the contexts differ in length, and the tokenizer has no token to fill the shorter "
                "ones with; set tokenizer.pad_token, or run them one by one"
            )
        return 0 if found is None else int(found)

    # ---- tokens to answers -----------------------------------------------------------------------

    def _together(
        self,
        prompts: list[list[Prompt]],
        press: InstalledPress | None,
        cache: Any,
        options: dict[str, Any],
    ) -> Answered:
        """Compress every context with each of its questions, and answer it."""
        flat = [prompt for row in prompts for prompt in row]
        delimiter: list[int] = []
        if isinstance(press, Finch):
            if not all(prompt.question for prompt in flat):
                raise UserError("FinchPress needs the question; give one that is not empty")
            delimiter, press = [DELIMITER], replace(press, delimiter_token_id=DELIMITER)
        found: list[Answered] = []
        step = len(prompts)  # the batch size is the number of contexts
        for start in range(0, len(flat), step):
            part = flat[start : start + step]
            rows = [p.context + p.question for p in part]
            read = [[*p.context, *delimiter, *p.question] for p in part]
            # A cache holds one batch: with several batches, each gets a copy of the empty one.
            own = cache if len(flat) <= step else independent_copy(cache)
            with compressed(self.model, rows, press, self._pad_id(rows), own, read) as state:
                found.append(self._ask(state, [[prompt.tail] for prompt in part], options))
        remaining = (answer for each in found for (answer,) in each.answers)
        evicted = sum(each.evicted * len(each.answers) for each in found) / len(flat)
        return Answered([[next(remaining) for _ in row] for row in prompts], evicted)

    def _ask(
        self, state: Compressed, new: list[list[list[int]]], options: dict[str, Any]
    ) -> Answered:
        """Answer the new tokens of each row: the first question of each, then the second...

        Questions of the same length form a batch. They are never padded, so presses that act while
        decoding need no mask with padding between tokens. Answers are cut if the model runs out of
        positions.
        """
        wanted, limit = options["max_new_tokens"], self._limit
        tokens = {(n, i): ids for i, row in enumerate(new) for n, ids in enumerate(row)}

        def batch_key(question: tuple[int, int]) -> tuple[int, int, int]:
            (n, i), length = question, len(tokens[question])
            if limit is None or wanted is None:
                return n, length, wanted or 0
            # The last token of an answer is never fed to the model, and takes no position.
            return n, length, max(1, min(wanted, limit - state.n_positions(i) - length + 1))

        answers: list[list[Any]] = [[None] * len(row) for row in new]
        evicted = 0.0
        for (n, _, at_most), group in groupby(sorted(tokens, key=batch_key), key=batch_key):
            if wanted is not None and at_most < wanted:
                logger.warning(
                    "answers are cut to %d tokens, not %d, which the %d positions of the model "
                    "have no room for; set max_position_embeddings if it can go further",
                    *(at_most, wanted, limit),
                )
            rows, own = [i for _, i in group], {**options, "max_new_tokens": at_most or None}
            sequences = state.generate(rows, [tokens[n, i] for i in rows], own)
            for i, of_row in zip(rows, sequences, strict=True):
                texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in of_row]
                answers[i][n] = texts if len(texts) > 1 else texts[0]
            evicted += state.evicted * len(rows)
        return Answered(answers, evicted / len(tokens))
