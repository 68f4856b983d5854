"""From a long context to answers: compress it once, ask many questions of what is left.

```python
answerer = ContextAnswerer(*load_model("facts-llama"))
answerer("river alice tea stone of", ["? alice"], press=SnapKVPress(0.5), max_new_tokens=1)

pipe = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)  # of transformers
pipe("river alice tea stone of", question="? alice", press=SnapKVPress(0.5), max_new_tokens=1)
```

Both do the same. Importing this module, and nothing else of this project, adds the name
`"kv-press-text-generation"` to the pipelines that `transformers` knows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Pipeline,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer
from transformers.pipelines import PIPELINE_REGISTRY

from experiments import UserError
from press_core import Phase, Press, RaggedLayer
from press_core.cache.pruned import ChannelPrunedLayer, PrunedLayer
from press_core.presses.finch import Finch

TASK = "kv-press-text-generation"

DELIMITER = 2**31 - 1
"""Token id between context and question for Finch, which takes it out again: in no vocabulary."""

_MARK = "\x00question\x00"  # where a chat template is cut


class ContextAnswerer:
    """Compresses contexts with a press and answers questions about them.

    Args:
        model: a decoder of `transformers`, dispatched over devices or not.
        tokenizer: of that model, with or without chat template and padding token.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer

    def __call__(
        self,
        contexts: str | Sequence[str],
        questions: Sequence[str] | Sequence[Sequence[str]],
        *,
        press: Press | None = None,
        answer_prefix: str | Sequence[str] = "",
        compress_questions: bool = False,
        cache: Any = None,
        max_context_length: int | None = None,
        max_positions: int | None = None,
        chat_template: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        max_new_tokens: int = 50,
        **generation: Any,
    ) -> list[Any]:
        """Answer questions about each context.

        The text is context, question, `answer_prefix`, one right after the other: separators are up
        to the caller. A chat template goes around context and question. All contexts run as one
        batch; what a row keeps and answers does not depend on the others.

        Args:
            contexts: one or several.
            questions: about the context, or about each of several: the same for all, or a list for
                each. All of them are asked of the same compressed cache, none sees another.
            answer_prefix: how every answer begins, or those about each context.
            press: of either package; None: nothing is compressed.
            compress_questions: compress context and question together, for each question anew. If
                no text follows the question, its last token is run again on the compressed cache,
                for its first run did not feel the eviction. A `FinchPress` always does this.
            cache: an empty cache to use, say a QuantizedCache; holds the compressed context
                afterwards, without the questions.
            max_context_length: longer contexts lose tokens in their middle; None: none do.
            max_positions: tokens that context and question may take; None: as many as the model
                was made for (`max_position_embeddings`).
            chat_template: whether to apply it; None: where there is one.
            template_options: for `tokenizer.apply_chat_template`, such as `enable_thinking`.
            generation: for `model.generate`, such as `do_sample`.

        Returns:
            The answers as text, a list for each context (if there are several) with an answer, or a
            list of `num_return_sequences` answers, for each question.

        Raises:
            UserError: saying what is wrong with the texts, the cache or the tokenizer.
            PressError: if the press does not fit model or cache.
        """
        several = not isinstance(contexts, str)
        contexts = list(contexts) if several else [contexts]  # type: ignore[list-item]
        asked = _questions_of(contexts, questions)
        template = self._template(chat_template, template_options or {})
        heads = [self._context_ids(c, template, max_context_length) for c in contexts]
        prefixes = (
            [answer_prefix] * len(contexts) if isinstance(answer_prefix, str) else answer_prefix
        )
        prompts = [
            [self._prompt(head, q, tail + prefix) for q in per_context]
            for (head, tail), per_context, prefix in zip(heads, asked, prefixes, strict=True)
        ]
        for prompt in (prompt for row in prompts for prompt in row):
            self._check_length(prompt, max_positions)
        options = {"max_new_tokens": max_new_tokens, **generation}
        press, delimiter = _with_delimiter(press)
        if compress_questions or delimiter is not None:
            answers = self._together(prompts, press, delimiter, cache, options)
        else:
            rows = [Row(row[0].context) for row in prompts]
            with compressed(self.model, rows, press, self._pad_id(rows), cache) as state:
                answers = self._ask_all(state, prompts, options)
        return answers if several else answers[0]

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
            if ids[-1] == self.tokenizer.eos_token_id:  # the text goes on
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
            ids = ids[: at_most // 2] + ids[at_most // 2 - at_most :]
        return ids, tail

    def _encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def _prompt(self, context: list[int], question: str, tail: str) -> Prompt:
        prompt = Prompt(context, self._encode(question), self._encode(tail))
        if not prompt.question and not prompt.tail:
            raise UserError(
                "there is nothing to answer: the question and answer_prefix are empty, and the "
                "tokenizer has no chat template that would ask for an answer; give a question"
            )
        return prompt

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
    ) -> list[list[Any]]:
        """Compress every context with each of its questions, and answer it."""
        flat = [prompt for row in prompts for prompt in row]
        rows = [Row(p.context + p.question, len(p.context)) for p in flat]
        answers: list[Any] = []
        step = len(prompts)  # as large a batch as the contexts alone would be
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            # A cache holds one batch: if there are more, each has a copy of the empty one.
            own = cache if len(rows) <= step else _copied(cache)
            with compressed(self.model, part, press, self._pad_id(part), own, delimiter) as state:
                tails = {i: flat[start + i].tail for i in range(len(part))}
                found = self._ask(state, tails, options)
                answers += [found[i] for i in range(len(part))]
        remaining = iter(answers)
        return [[next(remaining) for _ in row] for row in prompts]

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


class Row(NamedTuple):
    """Token ids to compress, and where the question begins among them (None: there is none)."""

    ids: list[int]
    question_at: int | None = None


def _questions_of(contexts: Sequence[str], questions: Any) -> list[list[str]]:
    """The questions about each context, all checked."""
    if not contexts:
        raise UserError("there is no context; give at least one")
    for place, context in enumerate(contexts):
        if not isinstance(context, str) or not context.strip():
            raise UserError(
                f"context {place} is {context!r:.60}; a context is a text with at least one word"
            )
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


def _with_delimiter(press: Press | None) -> tuple[Press | None, int | None]:
    """The press as it is run, and the delimiter that it expects before a question, if any."""
    if not isinstance(press, Finch):
        return press, None
    if press.delimiter_token_id is None:
        press = replace(press, delimiter_token_id=DELIMITER)
    return press, press.delimiter_token_id


# ---- a compressed cache --------------------------------------------------------------------------


class Compressed:
    """A batch of rows, compressed, that can be continued many times.

    Attributes:
        ids: `(B, S)` int64, the tokens that the cache has seen, padded on the left.
        mask: `(B, S)` int64, 0 where a row is padded.
        cache: never changed by `generate`.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Any) -> None:
        self.model, self.ids, self.mask, self.cache = model, ids, mask, cache

    def generate(
        self, rows: Sequence[int], new: Sequence[Sequence[int]], options: Mapping[str, Any]
    ) -> list[list[list[int]]]:
        """Continue some rows with new tokens, and let the model go on from there.

        Args:
            rows: of the batch.
            new: for each of them as many tokens. None at all: the last token is run again, at its
                own position, or at the next one where keys were turned to other positions.
            options: for `model.generate`.

        Returns:
            For each row its sequences of generated tokens, ended before the end-of-sequence token.
        """
        width = max(options.get("num_beams") or 1, options.get("num_return_sequences") or 1)
        cache = _copied(self.cache)
        if list(rows) != list(range(len(self.ids))):
            cache.batch_select_indices(torch.tensor(rows, device=self.ids.device))
        if width > 1:
            cache.batch_repeat_interleave(width)
        seen = int(cache.get_seq_length())  # fewer than went in, where keys were turned
        ids, mask = self.ids[rows, -seen:], self.mask[rows, -seen:]
        again = not new[0]
        following = ids[:, -1:] if again else torch.tensor(new, device=ids.device)
        mask = torch.cat((mask, torch.ones_like(following)), dim=1)
        arguments = {"attention_mask": mask, "past_key_values": cache, **options}
        if again and not any(_is_turned(layer) for layer in cache.layers):
            positions = mask.cumsum(dim=-1) - 1
            positions[:, -1] -= 1
            arguments["position_ids"] = positions.clamp(min=0)
        ids = torch.cat((ids, following), dim=1)
        output = self.model.generate(ids, **arguments)[:, ids.shape[1] :]
        ended = [_until_end(sequence, self._ends(options)) for sequence in output.tolist()]
        n = len(ended) // len(rows)
        return [ended[start : start + n] for start in range(0, len(ended), n)]

    def _ends(self, options: Mapping[str, Any]) -> list[int]:
        ends = options.get("eos_token_id", self.model.generation_config.eos_token_id)
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _until_end(sequence: list[int], ends: list[int]) -> list[int]:
    first = next((i for i, token in enumerate(sequence) if token in ends), len(sequence))
    return sequence[:first]


@contextmanager
def compressed(
    model: PreTrainedModel,
    rows: Sequence[Row],
    press: Press | None,
    pad_id: int,
    cache: Any = None,
    delimiter: int | None = None,
) -> Iterator[Compressed]:
    """Run the rows through the model as one batch and compress what it caches.

    The press is taken off the model right after that, unless it acts while decoding as well, or has
    left a cache that the model cannot read without help.

    Args:
        rows: at least one.
        pad_id: what shorter rows are filled with on their left.
        cache: an empty one; None: a `DynamicCache`.
        delimiter: token to put before the question of each row; the press takes it out again.
    """
    if cache is None:
        cache = DynamicCache(config=model.config)
    elif cache.get_seq_length():
        raise UserError(
            f"the cache holds {cache.get_seq_length()} tokens; give an empty one for each batch "
            "of contexts"
        )
    # A model that is spread over devices takes its inputs from wherever they are.
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    ids, mask = _left_padded([row.ids for row in rows], pad_id, device)
    given, given_mask = ids, mask
    if delimiter is not None:
        delimited = [[*r.ids[: r.question_at], delimiter, *r.ids[r.question_at :]] for r in rows]
        given, given_mask = _left_padded(delimited, pad_id, device)
    arguments = {"input_ids": given}
    if not bool(given_mask.all()):
        positions = (given_mask.cumsum(dim=-1) - 1).clamp(min=0)
        arguments |= {"attention_mask": given_mask, "position_ids": positions}
    with ExitStack() as scope:
        if press is not None:
            scope.enter_context(press(model))
        with torch.no_grad():
            model(**arguments, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if press is not None and not _is_needed(press, cache):
            scope.close()
        yield Compressed(model, ids, mask, cache)


def _left_padded(
    rows: Sequence[list[int]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ids and mask `(B, S)` of rows of different lengths."""
    longest = max(len(row) for row in rows)
    ids = [[pad_id] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _is_needed(press: Press, cache: Any) -> bool:
    """Whether `press` has to stay open while `cache` is decoded."""
    later = Phase.DECODING | Phase.BEFORE_DECODING
    return bool(press.phases & later) or any(_needs_help(layer) for layer in cache.layers)


def _needs_help(layer: Any) -> bool:
    """Whether a layer refuses to be decoded while no scope is open."""
    if isinstance(layer, (RaggedLayer, ChannelPrunedLayer)):
        return True
    return isinstance(layer, PrunedLayer) and bool(layer.needs)


def _is_turned(layer: Any) -> bool:
    """Whether positions continue from the number of keys kept, not of the tokens seen."""
    return isinstance(layer, PrunedLayer) and layer.rerotation is not None


def _copied(cache: Any) -> Any:
    """A cache that can be continued without a change to `cache`."""
    copied = copy.copy(cache)  # what moves offloaded layers about stays shared
    if cache is not None:
        copied.layers = [_copied_layer(layer) for layer in cache.layers]
    return copied


def _copied_layer(layer: Any) -> Any:
    if isinstance(layer, RaggedLayer) or not isinstance(layer, DynamicLayer):
        return copy.deepcopy(layer)  # these write into the tensors that they have
    copied = copy.copy(layer)
    if isinstance(layer, PrunedLayer):
        copied.storage, copied.buffers = copy.copy(layer.storage), dict(layer.buffers)
    return copied


# ---- the pipeline of transformers ----------------------------------------------------------------


class KVPressTextGenerationPipeline(Pipeline):
    """`ContextAnswerer` as a pipeline of `transformers`.

    ```python
    pipe(context, question="? alice", press=press)["answer"]
    pipe(context, questions=["? alice", "? bob"], press=press)["answers"]
    pipe([context, context], questions=[["? alice"], ["? bob"]], press=press, batch_size=2)
    ```

    Options are those of `ContextAnswerer.__call__`, here or when the pipeline is made. Contexts may
    also come as a generator or a dataset, whose items are texts or mappings with "context" and
    "questions".
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __call__(
        self,
        inputs: Any,
        question: str | None = None,
        questions: Sequence[Any] | None = None,
        **options: Any,
    ) -> Any:
        """Answer one question (`{"answer": ...}`) or several (`{"answers": [...]}`) per context."""
        single = question is not None
        if single and questions is not None:
            raise UserError("both question and questions were given; give one of the two")
        asked = [question] if single else questions
        if isinstance(inputs, (list, tuple)) and (asked is not None or not inputs):
            pairs = zip(inputs, _questions_of(inputs, asked), strict=True)
            inputs = [{"context": context, "questions": own} for context, own in pairs]
        return super().__call__(inputs, questions=asked, single=single, **options)

    def _sanitize_parameters(
        self, questions: Any = None, single: bool = False, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {"questions": questions}, options, {"single": single}

    def preprocess(self, item: Any, questions: Any = None) -> dict[str, Any]:
        """One context with its questions, not yet as tokens: a batch of texts pads less."""
        if not isinstance(item, str):
            return {"contexts": item["context"], "questions": item.get("questions", questions)}
        return {"contexts": item, "questions": questions}

    def _forward(self, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
        answer = ContextAnswerer(self.model, self.tokenizer)
        return {"answers": answer(inputs["contexts"], inputs["questions"], **options)}

    def postprocess(self, outputs: dict[str, Any], single: bool = False) -> dict[str, Any]:
        return {"answer": outputs["answers"][0]} if single else outputs


if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
    PIPELINE_REGISTRY.register_pipeline(
        TASK, pipeline_class=KVPressTextGenerationPipeline, pt_model=AutoModelForCausalLM
    )
