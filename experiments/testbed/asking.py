"""The facts task asked of pruned caches, in two ways.

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

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from experiments import UserError, refusing
from experiments.testbed.facts import VOCABULARY, FactBatch, draw
from press_core.presses.finch import Finch
from press_core.scope import InstalledPress

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
